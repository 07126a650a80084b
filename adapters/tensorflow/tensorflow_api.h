/* What ops.cc uses of TensorFlow's C interface: own prototypes in one table, filled from the TensorFlow that the
 * process has loaded. Nothing here needs TensorFlow when it is compiled, so one binary serves every release from 2.13
 * on.
 */
#ifndef RONDE_ADAPTERS_TENSORFLOW_TENSORFLOW_API_H_
#define RONDE_ADAPTERS_TENSORFLOW_TENSORFLOW_API_H_

#include <cstddef>
#include <cstdint>
#include <string>

struct TF_Tensor;
struct TF_Status;
struct TF_KernelBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_AsyncOpKernelDoneCallback;
struct TF_OpDefinitionBuilder;
struct TF_ShapeHandle;
struct TF_ShapeInferenceContext;

namespace ronde::tensorflow {

using CreateKernel = void* (*)(TF_OpKernelConstruction*);
using ComputeAsync = void (*)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*);
using DeleteKernel = void (*)(void*);
using InferShapes = void (*)(TF_ShapeInferenceContext*, TF_Status*);

// TF_Code: numbers of TensorFlow's public interface.
constexpr int kOk = 0, kUnknown = 2, kInvalidArgument = 3, kFailedPrecondition = 9;
// TF_DataType.
constexpr int kInt32 = 3, kInt64 = 9;

// Result, name, parameters. Enumerations are passed as int.
#define RONDE_TENSORFLOW_FUNCTIONS(F)                                                                                  \
  F(TF_Status*, TF_NewStatus, ())                                                                                      \
  F(void, TF_DeleteStatus, (TF_Status*))                                                                               \
  F(void, TF_SetStatus, (TF_Status*, int, const char*))                                                                \
  F(int, TF_GetCode, (const TF_Status*))                                                                               \
  F(const char*, TF_Message, (const TF_Status*))                                                                       \
  F(int, TF_TensorType, (const TF_Tensor*))                                                                            \
  F(int, TF_NumDims, (const TF_Tensor*))                                                                               \
  F(int64_t, TF_Dim, (const TF_Tensor*, int))                                                                          \
  F(size_t, TF_TensorByteSize, (const TF_Tensor*))                                                                     \
  F(void*, TF_TensorData, (const TF_Tensor*))                                                                          \
  F(void, TF_DeleteTensor, (TF_Tensor*))                                                                               \
  F(void, TF_RunAsyncOpKernelDoneCallback, (TF_AsyncOpKernelDoneCallback*))                                            \
  F(TF_KernelBuilder*, TF_NewAsyncKernelBuilder, (const char*, const char*, CreateKernel, ComputeAsync, DeleteKernel)) \
  F(void, TF_RegisterKernelBuilder, (const char*, TF_KernelBuilder*, TF_Status*))                                      \
  F(int, TF_NumInputs, (TF_OpKernelContext*))                                                                          \
  F(void, TF_GetInput, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                                            \
  F(void, TF_OpKernelConstruction_Failure, (TF_OpKernelConstruction*, TF_Status*))                                     \
  F(void, TF_OpKernelContext_Failure, (TF_OpKernelContext*, TF_Status*))                                               \
  F(void, TF_OpKernelConstruction_GetAttrSize,                                                                         \
    (TF_OpKernelConstruction*, const char*, int32_t*, int32_t*, TF_Status*))                                           \
  F(void, TF_OpKernelConstruction_GetAttrString, (TF_OpKernelConstruction*, const char*, char*, size_t, TF_Status*))   \
  F(void, TF_OpKernelConstruction_GetAttrInt32, (TF_OpKernelConstruction*, const char*, int32_t*, TF_Status*))         \
  F(void, TF_OpKernelConstruction_GetAttrInt32List,                                                                    \
    (TF_OpKernelConstruction*, const char*, int32_t*, int, TF_Status*))                                                \
  F(TF_Tensor*, TF_AllocateOutput, (TF_OpKernelContext*, int, int, const int64_t*, int, size_t, TF_Status*))           \
  F(TF_Tensor*, TF_ForwardInputOrAllocateOutput,                                                                       \
    (TF_OpKernelContext*, const int*, int, int, const int64_t*, int, int*, TF_Status*))                                \
  F(TF_OpDefinitionBuilder*, TF_NewOpDefinitionBuilder, (const char*))                                                 \
  F(void, TF_RegisterOpDefinition, (TF_OpDefinitionBuilder*, TF_Status*))                                              \
  F(void, TF_OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder*, const char*))                                       \
  F(void, TF_OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder*, const char*))                                      \
  F(void, TF_OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder*, const char*))                                     \
  F(void, TF_OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder*, bool))                                        \
  F(void, TF_OpDefinitionBuilderSetShapeInferenceFunction, (TF_OpDefinitionBuilder*, InferShapes))                     \
  F(TF_ShapeHandle*, TF_NewShapeHandle, ())                                                                            \
  F(void, TF_DeleteShapeHandle, (TF_ShapeHandle*))                                                                     \
  F(int64_t, TF_ShapeInferenceContextNumInputs, (TF_ShapeInferenceContext*))                                           \
  F(void, TF_ShapeInferenceContextGetInput, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))             \
  F(void, TF_ShapeInferenceContextSetOutput, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))            \
  F(TF_ShapeHandle*, TF_ShapeInferenceContextScalar, (TF_ShapeInferenceContext*))                                      \
  F(void, TF_ShapeInferenceContextWithRank,                                                                            \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, TF_ShapeHandle*, TF_Status*))                                \
  F(void, TF_ShapeInferenceContextWithRankAtLeast,                                                                     \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, TF_ShapeHandle*, TF_Status*))                                \
  F(void, TF_ShapeInferenceContextSubshape,                                                                            \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, int64_t, TF_ShapeHandle*, TF_Status*))                       \
  F(void, TF_ShapeInferenceContextConcatenateShapes,                                                                   \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, TF_ShapeHandle*, TF_ShapeHandle*, TF_Status*))

struct Api {
#define RONDE_MEMBER(result, name, parameters) result(*name) parameters = nullptr;
  RONDE_TENSORFLOW_FUNCTIONS(RONDE_MEMBER)
#undef RONDE_MEMBER
};

/* Fills the table from the loaded TensorFlow; what is wrong, or "". */
std::string LoadApi(Api* api);

}  // namespace ronde::tensorflow

#endif  // RONDE_ADAPTERS_TENSORFLOW_TENSORFLOW_API_H_
