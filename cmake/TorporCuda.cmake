# Finds cuda.h, in TORPOR_CUDA_ROOT (a CMake or environment variable), in an installed CUDA Toolkit, or in NVIDIA's wheels
# beside the Python in use (nvidia-cuda-runtime). Sets TORPOR_CUDA_INCLUDE, or leaves it empty: torpor is then built
# without CUDA. Nothing of CUDA is linked.
if(NOT TORPOR_CUDA_ROOT AND DEFINED ENV{TORPOR_CUDA_ROOT})
  set(TORPOR_CUDA_ROOT $ENV{TORPOR_CUDA_ROOT})
endif()
set(hints ${TORPOR_CUDA_ROOT} $ENV{CUDA_HOME} $ENV{CUDA_PATH} /usr/local/cuda)
find_package(Python3 QUIET COMPONENTS Interpreter)
if(Python3_Interpreter_FOUND)
  execute_process(COMMAND ${Python3_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_paths()['purelib'])" OUTPUT_VARIABLE packages OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  list(APPEND hints ${packages}/nvidia/cu13)
endif()
find_path(TORPOR_CUDA_INCLUDE NAMES cudaTypedefs.h HINTS ${hints} PATH_SUFFIXES include)
if(TORPOR_CUDA_INCLUDE)
  message(STATUS "CUDA headers: ${TORPOR_CUDA_INCLUDE}")
else()
  set(TORPOR_CUDA_INCLUDE "")
  message(STATUS "CUDA headers: none; without CUDA (set TORPOR_CUDA_ROOT, or pip install nvidia-cuda-runtime)")
endif()
