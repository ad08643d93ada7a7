# TORPOR_PORTABLE makes a Python module and an inspector that run on every x86-64 Linux with glibc 2.28 or newer
# (manylinux_2_28), whatever libraries it has: torpor's are linked statically, and zig's linker links against the
# symbols of that glibc; this machine's own is too new. libcurl and OpenSSL are loaded when they are first needed
# (bindings/portable_system.cpp). What the C++ library wants of a newer glibc is in
# bindings/portable_glibc.cpp.
# TORPOR_ZIG is the linker's command, "python;-m;ziglang" for PyPI's package.

set(CMAKE_FIND_LIBRARY_SUFFIXES .a)
set(Boost_USE_STATIC_LIBS ON)

# libgcc_s stays shared, so that all modules of a process unwind with the same one.
foreach(library libstdc++.a libgcc_s.so.1)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${library} OUTPUT_VARIABLE file
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  string(APPEND libraries " ${file}")
endforeach()
list(JOIN TORPOR_ZIG " " zig)
set(linked "-o <TARGET> <OBJECTS> <LINK_LIBRARIES>${libraries} -lpthread -ldl -lm")
set(zig "${zig} cc -target x86_64-linux-gnu.2.28 -s -Wl,--gc-sections")
set(CMAKE_CXX_CREATE_SHARED_MODULE
  "${zig} -shared -Wl,--version-script=${PROJECT_SOURCE_DIR}/bindings/exported.map ${linked}")
set(CMAKE_CXX_LINK_EXECUTABLE
  "${zig} -Wl,--allow-shlib-undefined ${linked}")

# What a target has to carry that is linked so.
function(torpor_portable target)
  set(here ${PROJECT_SOURCE_DIR}/bindings)
  target_sources(${target} PRIVATE ${here}/portable_glibc.cpp ${here}/portable_libraries.cpp
    ${here}/portable_system.cpp)
  set_source_files_properties(${here}/portable_libraries.cpp TARGET_DIRECTORY ${target}
    PROPERTIES COMPILE_OPTIONS -fkeep-inline-functions)
endfunction()
