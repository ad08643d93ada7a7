# torpor_precompiled(SOURCES …): where clang compiles with sanitizers, these sources begin with headers of libraries
# that were read once for all of them; that saves up to a third of the time of each. (g++ gains nothing by it.) Every
# source still includes what it needs: g++ tells. Only headers from outside the checkout, found by a path that is
# relative to the build folder, so that the compiler's cache finds in one checkout what was compiled in another:
# target_precompile_headers() names the checkout.
set(headers algorithm array atomic bit charconv chrono condition_variable deque filesystem fstream functional future
  iostream limits list map memory mutex numeric optional random set span string string_view thread tuple unordered_map
  unordered_set variant vector fmt/ranges.h tl/expected.hpp boost/filesystem.hpp nlohmann/json.hpp
  gmock/gmock.h)
set(TORPOR_PRECOMPILED "")
if(TORPOR_SANITIZE MATCHES "^(address,undefined|thread)$" AND TORPOR_BUILD_TESTS
    AND CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_GENERATOR STREQUAL "Ninja")
  set(TORPOR_PRECOMPILED ${CMAKE_BINARY_DIR}/torpor_headers.pch)
  list(TRANSFORM headers PREPEND "-include;")
  separate_arguments(flags UNIX_COMMAND "${CMAKE_CXX_FLAGS}")
  find_file(TORPOR_GTEST_HEADER gtest/gtest.h REQUIRED)
  # As a library is compiled; the tests' own definition is that of GoogleTest.
  add_custom_command(OUTPUT ${TORPOR_PRECOMPILED}
    COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${CMAKE_CXX_COMPILER} ${flags} -std=c++20 -fPIC
      "-D$<JOIN:$<TARGET_PROPERTY:torpor_base,COMPILE_DEFINITIONS>,;-D>" -DGTEST_HAS_PTHREAD=1
      "$<TARGET_PROPERTY:torpor_base,COMPILE_OPTIONS>" -Xclang -fno-pch-timestamp -fpch-instantiate-templates ${headers}
      -MD -MT torpor_headers.pch -MF torpor_headers.pch.d -x c++-header ${TORPOR_GTEST_HEADER} -o torpor_headers.pch
    DEPFILE torpor_headers.pch.d WORKING_DIRECTORY ${CMAKE_BINARY_DIR} VERBATIM COMMAND_EXPAND_LISTS)
  add_custom_target(torpor_headers DEPENDS ${TORPOR_PRECOMPILED})
endif()

# Sources with options of their own do not fit and stay as they are.
function(torpor_precompiled)
  foreach(source ${ARGN})
    get_property(own SOURCE ${source} PROPERTY COMPILE_OPTIONS)
    if(TORPOR_PRECOMPILED AND NOT own)
      # All alike position-independent: CMake compiles programs otherwise than libraries.
      set_property(SOURCE ${source} PROPERTY COMPILE_OPTIONS -fPIC -include-pch torpor_headers.pch)
      set_property(SOURCE ${source} APPEND PROPERTY OBJECT_DEPENDS ${TORPOR_PRECOMPILED})
    endif()
  endforeach()
endfunction()
