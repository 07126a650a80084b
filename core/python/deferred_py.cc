// defer(): operations that a framework's engine starts, on one of its threads and without Python, when their arrays are
// ready.
//
// The functions have the form that MXNet's engine calls (MXEnginePushAsyncND): start(context, completion, argument)
// begins the operation and returns; completion.done(engine, operation, error) ends it later, from any thread; then
// release(argument). Arrays are opaque. Their memory is asked for when the operation starts, since before that it may
// move or not exist.
#include <pybind11/stl.h>

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <tuple>

#include "bindings.h"

namespace ronde::python {
namespace {

// How a framework lends an array's memory: github.com/dmlc/dlpack, version 0.
struct ManagedTensor {
  struct {
    void* data;
    std::int32_t device_type, device_id;
    std::int32_t ndim;
    std::uint8_t code, bits;
    std::uint16_t lanes;
    std::int64_t* shape;
    std::int64_t* strides;
    std::uint64_t byte_offset;
  } tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

// Returns 0 on success.
using LendFunction = int (*)(void* array, ManagedTensor** lent);
using FreeFunction = int (*)(void* array);

// A C++ object of the framework's engine, which copies it and expects it by value: three pointers.
struct Completion {
  void (*done)(void* engine, void* operation, const std::runtime_error* error);
  void* engine;
  void* operation;
};

struct Counts {
  std::atomic<std::int64_t> started{0}, ended{0};
};

// Result in place of the input. Belongs to the framework's engine, which gives it back to Release.
class Deferred {
 public:
  using Row = std::tuple<std::uintptr_t, std::int32_t, std::vector<std::int64_t>>;  // array, dtype, shape

  Deferred(const std::vector<Row>& rows, std::uintptr_t lend, std::uintptr_t free, std::string name, Counts* counts)
      : name_(std::move(name)),
        lend_(reinterpret_cast<LendFunction>(lend)),
        free_(reinterpret_cast<FreeFunction>(free)),
        counts_(counts) {
    for (const auto& [array, dtype, shape] : rows) {
      arrays_.push_back(reinterpret_cast<void*>(array));
      shapes_.push_back(shape);
      ronde_tensor tensor{};
      tensor.input = arrays_.back();  // for Check, which looks whether there is any
      tensor.dtype = dtype;
      tensor.ndim = static_cast<std::int32_t>(shape.size());
      tensor.shape = shapes_.back().data();  // stays where it is when the outer vector grows
      tensors_.push_back(tensor);
    }
    request.struct_size = sizeof(request);
    request.device = -1;
    request.name = name_.c_str();
    request.tensors = tensors_.data();
    request.num_tensors = static_cast<std::uint32_t>(tensors_.size());
    request.done = [](void* self, const ronde_error* error) { static_cast<Deferred*>(self)->Done(error); };
    request.context = this;
  }
  Deferred(const Deferred&) = delete;
  Deferred& operator=(const Deferred&) = delete;

  static void Start(void*, void* completion, void* self) { static_cast<Deferred*>(self)->Begin(completion); }

  static void Release(void* self) {
    auto* deferred = static_cast<Deferred*>(self);
    for (void* array : deferred->arrays_) deferred->free_(array);
    delete deferred;
  }

  ronde_request request{};

 private:
  // After the last line of it, and of Done, the object may be gone.
  void Begin(void* completion) {
    std::memcpy(&completion_, completion, sizeof(completion_));
    ++counts_->started;
    for (std::size_t i = 0; i < arrays_.size(); ++i) {
      ManagedTensor* lent = nullptr;
      if (lend_(arrays_[i], &lent) != 0 || !lent) {
        return End(kArgument, "the memory of '" + name_ + "' cannot be had from the framework");
      }
      lent_.push_back(lent);
      tensors_[i].output = static_cast<char*>(lent->tensor.data) + lent->tensor.byte_offset;
      tensors_[i].input = tensors_[i].output;
    }
    if (ronde_error* refused = ronde_submit(0, &request, nullptr)) {
      std::int32_t code = ronde_error_code(refused);
      std::string text = ronde_error_message(refused);
      ronde_error_free(refused);
      End(code, text);
    }
  }

  void Done(const ronde_error* error) {
    if (error) return End(ronde_error_code(error), ronde_error_message(error));
    Finish(nullptr);
  }

  // "ronde.PeerLostError: ...", for the framework to find the class by.
  void End(std::int32_t code, const std::string& text) {
    std::runtime_error error("ronde." + ErrorClassName(code) + ": " + text);
    Finish(&error);
  }

  void Finish(const std::runtime_error* error) {
    for (ManagedTensor* lent : lent_) {
      if (lent->deleter) lent->deleter(lent);
    }
    lent_.clear();
    ++counts_->ended;
    Completion completion = completion_;
    completion.done(completion.engine, completion.operation, error);
  }

  std::string name_;
  LendFunction lend_;
  FreeFunction free_;
  Counts* counts_;
  std::vector<void*> arrays_;  // owned
  std::vector<std::vector<std::int64_t>> shapes_;
  std::vector<ronde_tensor> tensors_;
  std::vector<ManagedTensor*> lent_;  // while it runs
  Completion completion_{};
};

}  // namespace

void BindDeferred(py::module_& module) {
  auto* counts = new Counts;  // never deleted: operations may outlive the interpreter
  module.def(
      "defer",
      [counts](std::int32_t op, std::string name, const std::vector<Deferred::Row>& arrays, std::uintptr_t lend,
               std::uintptr_t free, std::int32_t reduction, double prescale, double postscale, std::int32_t root,
               std::uint32_t process_set) {
        auto deferred = std::make_unique<Deferred>(arrays, lend, free, std::move(name), counts);
        ronde_request& request = deferred->request;
        request.op = op;
        request.reduction = reduction;
        request.prescale_factor = prescale;
        request.postscale_factor = postscale;
        request.root_rank = root;
        request.process_set = process_set;
        Check(ronde_check(0, &request));
        auto address = [](auto* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); };
        return std::make_tuple(address(&Deferred::Start), address(deferred.release()), address(&Deferred::Release));
      },
      "An operation in place, for a framework's engine to start: the addresses of start(), its argument and release(). "
      "Owns the arrays from now on, unless it raises.",
      py::arg("op"), py::arg("name"), py::arg("arrays"), py::arg("lend"), py::arg("free"), py::arg("reduction") = 0,
      py::arg("prescale") = 1.0, py::arg("postscale") = 1.0, py::arg("root") = 0, py::arg("process_set") = 0);
  module.def(
      "deferred_counts", [counts] { return std::make_tuple(counts->started.load(), counts->ended.load()); },
      "How many deferred operations were started so far, and how many have ended.");
}

}  // namespace ronde::python
