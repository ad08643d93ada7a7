# torpor_room(NAME SOURCES … USES …) makes the static library torpor::NAME of one folder.
# torpor_test(NAME SOURCES … USES … [LABELS …] [TIMEOUT seconds] [SHARDS n]) makes a GoogleTest program and registers it
# with CTest, its cases divided among n processes. Of each label ("unit" unless said otherwise) the target LABEL_tests
# builds all programs.

# Line tables suffice for stack traces; everything that -g adds to them takes a third of the time of a compile.
string(REGEX REPLACE "-g( |$)" "-g1\\1" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")

add_library(torpor_flags INTERFACE)
target_include_directories(torpor_flags INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_definitions(torpor_flags INTERFACE TORPOR_VERSION="${PROJECT_VERSION}")
target_compile_options(torpor_flags INTERFACE -Wall -Wextra -Wno-missing-field-initializers -Wnon-virtual-dtor -Woverloaded-virtual)
if(TORPOR_SANITIZE)
  target_compile_options(torpor_flags INTERFACE -fsanitize=${TORPOR_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(torpor_flags INTERFACE -fsanitize=${TORPOR_SANITIZE})
endif()

function(torpor_room name)
  cmake_parse_arguments(ROOM "" "" "SOURCES;USES;PRIVATE_USES" ${ARGN})
  add_library(torpor_${name} STATIC ${ROOM_SOURCES})
  add_library(torpor::${name} ALIAS torpor_${name})
  target_link_libraries(torpor_${name} PUBLIC torpor_flags ${ROOM_USES} PRIVATE ${ROOM_PRIVATE_USES})
endfunction()

function(torpor_test name)
  cmake_parse_arguments(TEST "" "TIMEOUT;SHARDS" "SOURCES;USES;LABELS" ${ARGN})
  if(NOT TEST_TIMEOUT)
    set(TEST_TIMEOUT 600)
  endif()
  if(NOT TEST_LABELS)
    set(TEST_LABELS unit)
  endif()
  if(NOT TEST_SHARDS)
    set(TEST_SHARDS 1)
  endif()
  add_executable(${name} ${TEST_SOURCES})
  target_link_libraries(${name} PRIVATE torpor_flags ${TEST_USES} GTest::gmock GTest::gtest_main)
  foreach(label ${TEST_LABELS})
    if(NOT TARGET ${label}_tests)
      add_custom_target(${label}_tests)
    endif()
    add_dependencies(${label}_tests ${name})
  endforeach()
  math(EXPR last "${TEST_SHARDS} - 1")
  foreach(shard RANGE ${last})
    set(test ${name})
    if(last GREATER 0)
      set(test ${name}.${shard})
    endif()
    add_test(NAME ${test} COMMAND ${name} --gtest_brief=1)
    set_tests_properties(${test} PROPERTIES TIMEOUT ${TEST_TIMEOUT} LABELS "${TEST_LABELS}" COST ${TEST_TIMEOUT}
      ENVIRONMENT "GTEST_TOTAL_SHARDS=${TEST_SHARDS};GTEST_SHARD_INDEX=${shard}")
  endforeach()
endfunction()
