# torpor_library(NAME [HOT] SOURCES … [COLD …] [APART …] USES …) makes the static library torpor::NAME of one folder.
# Where clang compiles it (asan, tsan, fuzz) it looks for fields that are touched without their lock
# (base/thread_annotations.h, base/mutex.h). With sanitizers only what is HOT is optimised: that takes two to three
# times as long to compile, and few libraries make up for that when their tests run. COLD are sources that run a few
# times a sleep, or wait for files, a network or the driver: they are optimised for users, too, only as far as it is
# fast to do. What bytes, blocks or the steps of an engine go through is not COLD.
# torpor_test(NAME SOURCES … [APART …] [ONE_THREAD …] [FORKS …] [REPEATS …] USES … [LABELS …] [TIMEOUT seconds]
# [SHARDS n]) makes a GoogleTest program and registers it with CTest, its cases divided among n processes; what has the
# longest time is begun first. Of each label ("unit" unless said otherwise) the target LABEL_tests builds all programs,
# and all_tests builds those of any label. ThreadSanitizer's build leaves out some of these sources. ONE_THREAD: their
# tests start no thread, so it would find nothing. FORKS: their tests start threads in processes that they fork, where
# it cannot follow. REPEATS: their threads do what those of the program's other sources do; the preset tsan-rest
# (TORPOR_TSAN_REPEATS) has them.

# Line tables suffice for stack traces; everything that -g adds to them takes a third of the time of a compile.
string(REGEX REPLACE "-g( |$)" "-g1\\1" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")

add_library(torpor_flags INTERFACE)
target_include_directories(torpor_flags INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
target_compile_definitions(torpor_flags INTERFACE TORPOR_VERSION="${PROJECT_VERSION}")
target_compile_options(torpor_flags INTERFACE
  $<BUILD_INTERFACE:-Wall;-Wextra;-Wno-missing-field-initializers;-Wnon-virtual-dtor;-Woverloaded-virtual>)
target_compile_features(torpor_flags INTERFACE cxx_std_20)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # By default it looks for garbage in 128 MiB of its own memory again and again; that takes a tenth of its time.
  target_compile_options(torpor_flags INTERFACE $<BUILD_INTERFACE:--param=ggc-min-heapsize=1048576>)
endif()
if(TORPOR_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # It takes every included source for a header.
  target_compile_options(torpor_flags INTERFACE $<BUILD_INTERFACE:-Wno-subobject-linkage>)
endif()
if(TORPOR_SANITIZE)
  target_compile_options(torpor_flags INTERFACE -fsanitize=${TORPOR_SANITIZE} -fno-omit-frame-pointer
    -fno-sanitize-recover=all)
  target_link_options(torpor_flags INTERFACE -fsanitize=${TORPOR_SANITIZE})
  # Linking is most of a build whose objects are all in the compiler's cache; gold takes half as long. (With address it
  # warns of a hundred symbols a program.)
  find_program(TORPOR_GOLD ld.gold)
  if(TORPOR_GOLD AND TORPOR_SANITIZE STREQUAL "thread")
    target_link_options(torpor_flags INTERFACE -fuse-ld=gold)
  endif()
  if(TORPOR_SANITIZE STREQUAL "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    # Tests that stand in for pthread_create find the sanitizer's behind their own only in a shared library.
    execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libclang_rt.tsan-x86_64.so OUTPUT_VARIABLE runtime
      OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    cmake_path(GET runtime PARENT_PATH runtime)
    target_link_options(torpor_flags INTERFACE -shared-libsan -Wl,-rpath,${runtime})
  endif()
endif()

# What to compile for these sources: they themselves or, with TORPOR_UNITY, files that include some of them each:
# headers and templates then cost once instead of once a source, a third of the time in all. (CMake's own unity files
# hold absolute paths, by which the compiler's cache would miss in another checkout.) Sources that define the same name
# in their unnamed namespaces cannot share a file: APART names those that stay alone.
function(torpor_sources result name)
  cmake_parse_arguments(UNITY "" "MOST" "APART" ${ARGN})
  if(NOT UNITY_MOST)
    set(UNITY_MOST 10)
  endif()
  set(sources ${UNITY_UNPARSED_ARGUMENTS})
  if(NOT TORPOR_UNITY)
    set(${result} ${sources} ${UNITY_APART} PARENT_SCOPE)
    return()
  endif()
  list(LENGTH sources count)
  math(EXPR files "(${count} + ${UNITY_MOST} - 1) / ${UNITY_MOST}")
  set(made "")
  set(at 0)
  set(index 0)
  while(index LESS files)
    math(EXPR index "${index} + 1")
    math(EXPR take "(${count} - ${at} + ${files} - ${index}) / (${files} - ${index} + 1)")
    list(SUBLIST sources ${at} ${take} some)
    math(EXPR at "${at} + ${take}")
    set(text "")
    foreach(source ${some})
      file(REAL_PATH ${source} path BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
      file(RELATIVE_PATH path ${PROJECT_SOURCE_DIR} ${path})
      string(APPEND text "#include \"${path}\"\n")
    endforeach()
    set(file ${CMAKE_CURRENT_BINARY_DIR}/${name}_${index}.cpp)
    file(CONFIGURE OUTPUT ${file} CONTENT "${text}" @ONLY)
    list(APPEND made ${file})
  endwhile()
  set(${result} ${made} ${UNITY_APART} PARENT_SCOPE)
endfunction()

# As torpor_sources, for sources that are COLD.
function(torpor_cold_sources result name)
  set(cold "")
  if(ARGN)
    torpor_sources(cold ${name}_cold ${ARGN} MOST 12)
    if(NOT TORPOR_SANITIZE)
      set_property(SOURCE ${cold} APPEND PROPERTY COMPILE_OPTIONS $<$<CONFIG:RelWithDebInfo>:-O1>)
    endif()
  endif()
  set(${result} ${cold} PARENT_SCOPE)
endfunction()

function(torpor_library name)
  cmake_parse_arguments(ROOM "HOT" "" "SOURCES;COLD;APART;USES;PRIVATE_USES" ${ARGN})
  torpor_sources(sources torpor_${name} ${ROOM_SOURCES} MOST 12 APART ${ROOM_APART})
  torpor_cold_sources(cold torpor_${name} ${ROOM_COLD})
  if(TORPOR_SANITIZE AND ROOM_HOT)
    set_property(SOURCE ${sources} ${cold} APPEND PROPERTY COMPILE_OPTIONS -O1)
  endif()
  torpor_precompiled(${sources} ${cold})
  add_library(torpor_${name} STATIC ${sources} ${cold})
  add_library(torpor::${name} ALIAS torpor_${name})
  target_link_libraries(torpor_${name} PUBLIC torpor_flags ${ROOM_USES} PRIVATE ${ROOM_PRIVATE_USES})
  target_compile_options(torpor_${name} PRIVATE $<$<CXX_COMPILER_ID:Clang>:-Wthread-safety;-Werror=thread-safety>)
endfunction()

function(torpor_test name)
  cmake_parse_arguments(TEST "" "TIMEOUT;SHARDS" "SOURCES;APART;ONE_THREAD;FORKS;REPEATS;USES;LABELS" ${ARGN})
  if(NOT TEST_TIMEOUT)
    set(TEST_TIMEOUT 1200)
  endif()
  if(NOT TEST_LABELS)
    set(TEST_LABELS unit)
  endif()
  if(NOT TEST_SHARDS)
    set(TEST_SHARDS 1)
  endif()
  set(without ${TEST_ONE_THREAD} ${TEST_FORKS})
  if(NOT TORPOR_TSAN_REPEATS)
    list(APPEND without ${TEST_REPEATS})
  endif()
  if(TORPOR_SANITIZE STREQUAL "thread" AND without)
    list(REMOVE_ITEM TEST_SOURCES ${without})
    list(REMOVE_ITEM TEST_APART ${without})
  endif()
  torpor_sources(sources ${name} ${TEST_SOURCES} APART ${TEST_APART})
  torpor_precompiled(${sources})
  add_executable(${name} ${sources})
  target_link_libraries(${name} PRIVATE torpor_flags ${TEST_USES} GTest::gmock GTest::gtest_main)
  if(NOT TORPOR_SANITIZE)
    target_link_libraries(${name} PRIVATE torpor_crash_trace)
  endif()
  foreach(label ${TEST_LABELS} all)
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
