# The GPUs' library: code for Ampere and Hopper, and PTX, which newer drivers compile. The CUDA runtime is inside, so
# that it needs a driver alone.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)

file(GLOB CUDA_KERNELS CONFIGURE_DEPENDS csrc/cuda/*.cu)
file(GLOB CUDA_OPS CONFIGURE_DEPENDS csrc/ops/cuda/*.cpp)
add_library(cuda_kernels OBJECT ${CUDA_KERNELS})
target_include_directories(cuda_kernels PRIVATE csrc)
target_compile_options(cuda_kernels PRIVATE -Xcompiler=-Wall,-Wextra $<$<BOOL:${PYG_DIST_WERROR}>:-Werror=all-warnings>)

add_library(pyg_dist_cuda SHARED ${CUDA_OPS} $<TARGET_OBJECTS:cuda_kernels>)
configure_ops_target(pyg_dist_cuda)
target_compile_definitions(pyg_dist_cuda PRIVATE USE_CUDA
                                                 PYG_DIST_CUDA_ARCHITECTURES="$<JOIN:${CMAKE_CUDA_ARCHITECTURES},$<COMMA>>")
set_target_properties(pyg_dist_cuda PROPERTIES LINKER_LANGUAGE CUDA)
target_link_libraries(pyg_dist_cuda PRIVATE pyg_dist)
link_torch(pyg_dist_cuda torch_cpu torch_cuda)
install(TARGETS pyg_dist_cuda LIBRARY DESTINATION pyg_dist/lib)
