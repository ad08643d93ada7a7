# Finds cuda.h, in TORPOR_CUDA_ROOT (a CMake or environment variable), in an installed CUDA Toolkit, or in NVIDIA's
# wheels beside the Python in use (nvidia-cuda-runtime). Sets TORPOR_CUDA_INCLUDE, or leaves it empty: torpor is then
# built without CUDA. Nothing of CUDA is linked. With nvcc (or nvidia-cuda-nvcc, nvidia-cuda-crt, nvidia-nvvm)
# torpor_cuda_image() compiles a kernel into an image that the driver loads; TORPOR_CUDA_KERNELS says whether it can.
if(NOT TORPOR_CUDA_ROOT AND DEFINED ENV{TORPOR_CUDA_ROOT})
  set(TORPOR_CUDA_ROOT $ENV{TORPOR_CUDA_ROOT})
endif()
set(hints ${TORPOR_CUDA_ROOT} $ENV{CUDA_HOME} $ENV{CUDA_PATH} /usr/local/cuda)
find_package(Python3 QUIET COMPONENTS Interpreter)
if(Python3_Interpreter_FOUND)
  execute_process(COMMAND ${Python3_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_paths()['purelib'])"
                  OUTPUT_VARIABLE packages OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  list(APPEND hints ${packages}/nvidia/cu13)
endif()
find_path(TORPOR_CUDA_INCLUDE NAMES cudaTypedefs.h HINTS ${hints} PATH_SUFFIXES include)
if(TORPOR_CUDA_INCLUDE)
  message(STATUS "CUDA headers: ${TORPOR_CUDA_INCLUDE}")
else()
  set(TORPOR_CUDA_INCLUDE "")
  message(STATUS "CUDA headers: none; without CUDA (set TORPOR_CUDA_ROOT, or pip install nvidia-cuda-runtime)")
endif()
find_program(TORPOR_NVCC NAMES nvcc HINTS ${hints} PATH_SUFFIXES bin)
# Ampere, Hopper and Blackwell; PTX for later ones.
set(nvcc_flags -std=c++20 --fatbin -I${PROJECT_SOURCE_DIR} -ccbin ${CMAKE_CXX_COMPILER}
    -gencode arch=compute_80,code=[sm_80,compute_80] -gencode arch=compute_90,code=sm_90 -gencode
      arch=compute_100,code=sm_100)
set(kernels "")
if(TORPOR_CUDA_INCLUDE AND TORPOR_NVCC)
  # An nvcc that does not go with this compiler, or does not know these GPUs, is as none.
  file(WRITE ${PROJECT_BINARY_DIR}/nvcc_try.cu "#include <span>\n__global__ void nothing() {}\n")
  execute_process(COMMAND ${TORPOR_NVCC} ${nvcc_flags} -o ${PROJECT_BINARY_DIR}/nvcc_try.fatbin
    ${PROJECT_BINARY_DIR}/nvcc_try.cu
    RESULT_VARIABLE failed OUTPUT_QUIET ERROR_VARIABLE why)
  if(failed)
    message(STATUS "CUDA kernels: none, ${TORPOR_NVCC} fails: ${why}")
  else()
    set(kernels ON)
    message(STATUS "CUDA kernels: compiled by ${TORPOR_NVCC}")
  endif()
else()
  message(STATUS "CUDA kernels: none, there is no nvcc")
endif()
set(TORPOR_CUDA_KERNELS ${kernels})

# Compiles SOURCE to IMAGE.
function(torpor_cuda_image source image)
  add_custom_command(OUTPUT ${image} COMMAND ${TORPOR_NVCC} ${nvcc_flags} -MD -MF ${image}.d -o ${image} ${source}
    DEPENDS ${source} DEPFILE ${image}.d VERBATIM)
endfunction()
