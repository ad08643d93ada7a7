# The target `thread_safety`: clang looks at every source of the rooms for fields that are touched without their lock
# (base/thread_annotations.h, base/mutex.h). Nothing is compiled, so it takes seconds a file. It also looks at a source that does touch one,
# and must complain about that.
find_program(TORPOR_CLANG clang++-16)
if(NOT TORPOR_CLANG)
  return()
endif()

set(flags -std=c++20 -fsyntax-only -Wno-everything -Wthread-safety -Werror=thread-safety -I${PROJECT_SOURCE_DIR} -DTORPOR_VERSION="")
if(TORPOR_CUDA_INCLUDE)
  list(APPEND flags -isystem ${TORPOR_CUDA_INCLUDE})
endif()

set(stamps)
foreach(room base allocator offload kvcache scheduler_state checkpoint delivery engine console)
  get_target_property(sources torpor_${room} SOURCES)
  get_target_property(folder torpor_${room} SOURCE_DIR)
  foreach(source ${sources})
    if(NOT source MATCHES "[.]cpp$" OR source MATCHES "xxh3_avx")  # of an instruction set of its own, and no locks
      continue()
    endif()
    get_filename_component(file ${source} ABSOLUTE BASE_DIR ${folder})
    get_filename_component(short ${source} NAME)
    string(REPLACE "/" "_" name ${room}/${short})
    set(stamp ${CMAKE_BINARY_DIR}/thread_safety/${name}.checked)
    add_custom_command(OUTPUT ${stamp}
      COMMAND ${TORPOR_CLANG} ${flags} -MD -MF ${stamp}.d -MT ${stamp} ${file}
      COMMAND ${CMAKE_COMMAND} -E touch ${stamp}
      DEPENDS ${file} DEPFILE ${stamp}.d COMMENT "Looking for unguarded access in ${room}/${short}" VERBATIM)
    list(APPEND stamps ${stamp})
  endforeach()
endforeach()

set(unguarded ${PROJECT_SOURCE_DIR}/tests/support/unguarded_access.cpp)
set(stamp ${CMAKE_BINARY_DIR}/thread_safety/unguarded_access.found)
add_custom_command(OUTPUT ${stamp}
  COMMAND ${CMAKE_COMMAND} -DCOMPILER=${TORPOR_CLANG} "-DFLAGS=${flags}" -DFILE=${unguarded} -P ${CMAKE_CURRENT_LIST_DIR}/must_not_compile.cmake
  COMMAND ${CMAKE_COMMAND} -E touch ${stamp}
  DEPENDS ${unguarded} ${PROJECT_SOURCE_DIR}/base/thread_annotations.h ${PROJECT_SOURCE_DIR}/base/mutex.h ${CMAKE_CURRENT_LIST_DIR}/must_not_compile.cmake
  COMMENT "Looking whether unguarded access is found" VERBATIM)
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/thread_safety)
add_custom_target(thread_safety DEPENDS ${stamps} ${stamp})
