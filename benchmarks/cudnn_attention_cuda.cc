#include "benchmarks/cudnn_attention_cuda.h"

#include "kvtier/error.h"

#include "benchmarks/shared_library.h"
#include "transfer/device/cuda_check.h"

#include <cuda_runtime.h>

#include <array>
#include <cmath>
#include <cudnn.h>
#include <deque>
#include <utility>

namespace kvtier::bench {

struct CudnnFunctions {
  decltype(&cudnnGetVersion) version = nullptr;
  decltype(&cudnnCreate) create = nullptr;
  decltype(&cudnnDestroy) destroy = nullptr;
  decltype(&cudnnSetStream) set_stream = nullptr;
  decltype(&cudnnGetErrorString) error_string = nullptr;
  decltype(&cudnnGetLastErrorString) last_error = nullptr;
  decltype(&cudnnBackendCreateDescriptor) create_descriptor = nullptr;
  decltype(&cudnnBackendDestroyDescriptor) destroy_descriptor = nullptr;
  decltype(&cudnnBackendSetAttribute) set_attribute = nullptr;
  decltype(&cudnnBackendGetAttribute) get_attribute = nullptr;
  decltype(&cudnnBackendFinalize) finalize = nullptr;
  decltype(&cudnnBackendExecute) execute = nullptr;

  void check(cudnnStatus_t status, const char* call) const {
    if (status == CUDNN_STATUS_SUCCESS) return;
    std::array<char, 1024> words{};
    last_error(words.data(), words.size());
    throw Error(ErrorCode::kUnimplemented, std::string("cuDNN: ") + call +
                                               ": expected success, found " + error_string(status) +
                                               " (" + words.data() + ")");
  }
};

namespace {

/// Names of the tensors of the graph.
enum TensorId : std::int64_t { kQuery = 1, kKeys, kValues, kOut, kScale };

using Dimensions = std::array<std::int64_t, 4>;

/// Owns a descriptor of the backend.
class Descriptor {
 public:
  Descriptor(const CudnnFunctions& functions, cudnnBackendDescriptorType_t type)
      : functions_(&functions) {
    functions.check(functions.create_descriptor(type, &handle_), "create descriptor");
  }
  Descriptor(Descriptor&& other) noexcept
      : functions_(other.functions_), handle_(std::exchange(other.handle_, nullptr)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(functions_, other.functions_);
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Descriptor() {
    if (handle_ != nullptr) functions_->destroy_descriptor(handle_);
  }

  template <typename T>
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                  const T* values, std::int64_t count) {
    functions_->check(functions_->set_attribute(handle_, name, type, count, values),
                      "set attribute");
    return *this;
  }
  template <typename T>
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, T value) {
    return set(name, type, &value, 1);
  }
  Descriptor& set(cudnnBackendAttributeName_t name, const Descriptor& part) {
    return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, part.handle_);
  }
  Descriptor& finalize() {
    functions_->check(functions_->finalize(handle_), "finalize");
    return *this;
  }
  [[nodiscard]] cudnnBackendDescriptor_t handle() const noexcept { return handle_; }

 private:
  const CudnnFunctions* functions_;
  cudnnBackendDescriptor_t handle_ = nullptr;
};

/// Makes the operations of one attention call, and keeps them.
class GraphBuilder {
 public:
  GraphBuilder(const CudnnFunctions& functions, cudnnHandle_t handle,
               const CudnnAttention::Shape& shape)
      : functions_(functions), handle_(handle), shape_(shape) {}

  const Descriptor& operation() {
#if CUDNN_VERSION >= 91301
    Descriptor& attend = operate(CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR);
    attend.set(CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC, query())
        .set(CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC, cache(kKeys))
        .set(CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC, cache(kValues))
        .set(CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC, out())
        .set(CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC, scale())
        .finalize();
    return graph();
#else
    throw Error(ErrorCode::kUnimplemented,
                "cuDNN: expected headers of 9.13.1 or newer for the attention operation, found " +
                    std::to_string(CUDNN_VERSION));
#endif
  }

 private:
  Descriptor& make(cudnnBackendDescriptorType_t type) {
    return parts_.emplace_back(functions_, type);
  }
  Descriptor& operate(cudnnBackendDescriptorType_t type) {
    Descriptor& made = make(type);
    operations_.push_back(made.handle());
    return made;
  }

  const Descriptor& tensor(std::int64_t id, cudnnDataType_t type, const Dimensions& dims,
                           const Dimensions& strides, bool by_value = false) {
    Descriptor& made = make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    made.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, id)
        .set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type)
        .set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, std::int64_t{16})
        .set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, dims.data(), 4)
        .set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, strides.data(), 4)
        .set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, false)
        .set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, by_value)
        .finalize();
    return made;
  }
  const Descriptor& row(std::int64_t id) {
    const std::int64_t d = shape_.head_dim, heads = shape_.query_heads;
    const std::int64_t n = shape_.query_tokens;
    return tensor(id, CUDNN_DATA_BFLOAT16, {shape_.batch, heads, n, d},
                  {heads * n * d, d, heads * d, 1});
  }
  const Descriptor& query() { return row(kQuery); }
  const Descriptor& out() { return row(kOut); }
  const Descriptor& scale() {
    return tensor(kScale, CUDNN_DATA_FLOAT, {1, 1, 1, 1}, {1, 1, 1, 1}, true);
  }
  const Descriptor& cache(std::int64_t id) {
    const std::int64_t d = shape_.head_dim, heads = shape_.kv_heads, n = shape_.tokens;
    return tensor(id, CUDNN_DATA_BFLOAT16, {shape_.batch, heads, n, d},
                  shape_.heads_first ? Dimensions{heads * n * d, n * d, d, 1}
                                     : Dimensions{heads * n * d, d, heads * d, 1});
  }
  const Descriptor& graph() {
    Descriptor& made = make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    made.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, operations_.data(),
             static_cast<std::int64_t>(operations_.size()))
        .set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, handle_)
        .finalize();
    return made;
  }

  const CudnnFunctions& functions_;
  cudnnHandle_t handle_;
  CudnnAttention::Shape shape_;
  std::deque<Descriptor> parts_;  // which does not move them
  std::vector<cudnnBackendDescriptor_t> operations_;
};

struct Plan {
  Descriptor descriptor;
  void* workspace = nullptr;
};

}  // namespace

struct CudnnAttention::Plans {
  std::vector<Plan> plans;
  float scale = 0.0F;

  ~Plans() {
    for (const Plan& plan : plans) cudaFree(plan.workspace);
  }
};

CudnnLibrary::CudnnLibrary() : functions_(std::make_unique<CudnnFunctions>()) {}

CudnnLibrary::~CudnnLibrary() {
  if (handle_ != nullptr) functions_->destroy(static_cast<cudnnHandle_t>(handle_));
  // The library stays loaded: it may have work of its own at exit.
}

std::shared_ptr<const CudnnLibrary> CudnnLibrary::load(const std::vector<std::string>& folders) {
  // Engines that are compiled at run time ask for this one by name; it may be in another folder.
  (void)open_library(folders, {"libnvrtc.so.13", "libnvrtc.so.12"}, nullptr);
  std::string tried;
  void* library = open_library(folders, {"libcudnn.so.9"}, &tried);
  if (library == nullptr) {
    throw Error(
        ErrorCode::kNotFound,
        "cuDNN: expected libcudnn.so.9 (--cuda-libs names its folder), found none: " + tried);
  }
  const std::shared_ptr<CudnnLibrary> loaded(new CudnnLibrary);
  CudnnFunctions& f = *loaded->functions_;
  bind(f.version, library, "cudnnGetVersion");
  bind(f.create, library, "cudnnCreate");
  bind(f.destroy, library, "cudnnDestroy");
  bind(f.set_stream, library, "cudnnSetStream");
  bind(f.error_string, library, "cudnnGetErrorString");
  bind(f.last_error, library, "cudnnGetLastErrorString");
  bind(f.create_descriptor, library, "cudnnBackendCreateDescriptor");
  bind(f.destroy_descriptor, library, "cudnnBackendDestroyDescriptor");
  bind(f.set_attribute, library, "cudnnBackendSetAttribute");
  bind(f.get_attribute, library, "cudnnBackendGetAttribute");
  bind(f.finalize, library, "cudnnBackendFinalize");
  bind(f.execute, library, "cudnnBackendExecute");
  cudnnHandle_t handle = nullptr;
  f.check(f.create(&handle), "cudnnCreate");
  loaded->handle_ = handle;
  const std::size_t version = f.version();
  loaded->name_ = "cuDNN " + std::to_string(version / 10000) + "." +
                  std::to_string(version / 100 % 100) + "." + std::to_string(version % 100);
  return loaded;
}

CudnnAttention::CudnnAttention(std::shared_ptr<const CudnnLibrary> library, const Shape& shape)
    : library_(std::move(library)), plans_(std::make_unique<Plans>()) {
  const CudnnFunctions& f = *library_->functions_;
  auto* handle = static_cast<cudnnHandle_t>(library_->handle_);
  plans_->scale = 1.0F / std::sqrt(static_cast<float>(shape.head_dim));
  GraphBuilder builder(f, handle, shape);
  const Descriptor& graph = builder.operation();
  Descriptor heuristics(f, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph)
      .set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_A)
      .finalize();
  std::vector<Descriptor> configurations;
  std::vector<cudnnBackendDescriptor_t> handles;
  for (int i = 0; i < 2 * kMaxPlans; ++i) {
    configurations.emplace_back(f, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    handles.push_back(configurations.back().handle());
  }
  std::int64_t found = 0;
  f.check(f.get_attribute(heuristics.handle(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                          CUDNN_TYPE_BACKEND_DESCRIPTOR, static_cast<std::int64_t>(handles.size()),
                          &found, handles.data()),
          "engine heuristics");
  std::string refused = "no engine";
  for (std::int64_t i = 0; i < found && num_plans() < kMaxPlans; ++i) {
    try {
      Descriptor plan(f, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
      plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configurations[static_cast<std::size_t>(i)])
          .set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, handle)
          .finalize();
      std::int64_t bytes = 0, count = 0;
      f.check(f.get_attribute(plan.handle(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                              CUDNN_TYPE_INT64, 1, &count, &bytes),
              "workspace size");
      void* workspace = nullptr;
      if (bytes > 0) {
        KVTIER_CUDA_CHECK(cudaMalloc(&workspace, static_cast<std::size_t>(bytes)));
      }
      plans_->plans.push_back({std::move(plan), workspace});
    } catch (const Error& error) {
      refused = error.what();
    }
  }
  if (plans_->plans.empty()) {
    throw Error(ErrorCode::kUnimplemented,
                "cuDNN: expected a plan for decode attention, found none: " + refused);
  }
}

CudnnAttention::~CudnnAttention() = default;

int CudnnAttention::num_plans() const noexcept { return static_cast<int>(plans_->plans.size()); }

void CudnnAttention::run(void* stream, int plan, const void* query, const void* keys,
                         const void* values, void* out) const {
  const CudnnFunctions& f = *library_->functions_;
  auto* handle = static_cast<cudnnHandle_t>(library_->handle_);
  const Plan& chosen = plans_->plans[static_cast<std::size_t>(plan)];
  f.check(f.set_stream(handle, static_cast<cudaStream_t>(stream)), "cudnnSetStream");
  const std::array<std::int64_t, 5> ids{kQuery, kKeys, kValues, kOut, kScale};
  const std::array<const void*, 5> pointers{query, keys, values, out, &plans_->scale};
  Descriptor pack(f, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, ids.data(), 5)
      .set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, pointers.data(), 5)
      .set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, chosen.workspace)
      .finalize();
  f.check(f.execute(handle, chosen.descriptor.handle(), pack.handle()), "execute");
}

}  // namespace kvtier::bench
