// What one request costs, stage by stage: nanoseconds and allocations per request, each stage alone on one thread, so
// that the numbers hold still for comparisons and `valgrind --tool=callgrind` counts the same work.
//
//   submit      ronde_submit of the C interface, in an engine of one rank that nobody drives meanwhile
//   negotiate   both ranks of a job of two: what each does with its own request, its peer's message and the batch
//   plan        the fusion plan of the batch
//   execute     the executor, over a backend that does nothing
//
//   submission [STAGE] [requests per step] [steps]
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "engine/executor.h"
#include "negotiation/fusion.h"
#include "negotiation/negotiator.h"
#include "ronde/ronde.h"

namespace ronde {
namespace {

std::atomic<std::uint64_t> allocations{0};  // by all threads

using Clock = std::chrono::steady_clock;

struct Work {
  int requests = 200;  // in a step
  int steps = 300;
};

// Nanoseconds per request of the part of a step that is timed; the median over the steps, the first fifth of which
// warms up.
class Meter {
 public:
  explicit Meter(const Work& work) : work_(work) {}
  template <class F>
  void Time(F&& part) {
    std::uint64_t before = allocations.load();
    auto start = Clock::now();
    part();
    spent_ += Clock::now() - start;
    allocated_ += allocations.load() - before;
  }
  void EndStep() {
    times_.push_back(std::chrono::duration<double, std::nano>(spent_).count() / work_.requests);
    spent_ = {};
    last_allocated_ = std::exchange(allocated_, 0);
  }
  void Print(const char* stage) {
    times_.erase(times_.begin(), times_.begin() + static_cast<std::ptrdiff_t>(times_.size() / 5));
    std::nth_element(times_.begin(), times_.begin() + static_cast<std::ptrdiff_t>(times_.size() / 2), times_.end());
    std::printf("%-24s %8.0f ns, %5.2f allocations per request\n", stage, times_[times_.size() / 2],
                static_cast<double>(last_allocated_) / work_.requests);
  }

 private:
  const Work work_;
  Clock::duration spent_{};
  std::uint64_t allocated_ = 0, last_allocated_ = 0;
  std::vector<double> times_;
};

std::string NameOf(int request) { return "gradient.5d3c1a77.0.layers." + std::to_string(request) + ".weight"; }
constexpr std::int64_t kShape[] = {32, 32};

void Require(ronde_error* error) {
  if (error == nullptr) return;
  std::fprintf(stderr, "submission: %s\n", ronde_error_message(error));
  std::exit(1);
}

void Submit(const Work& work) {
  ronde_config config{};
  config.struct_size = sizeof config;
  config.size = 1;
  ronde_endpoint* endpoint = nullptr;
  Require(ronde_endpoint_create(&config, &endpoint));
  std::size_t size = 0;
  const void* blob = ronde_endpoint_blob(endpoint, &size);
  ronde_engine engine = 0;
  Require(ronde_endpoint_connect(endpoint, &blob, &size, 10, &engine));

  std::vector<std::string> names;
  std::vector<std::vector<float>> memory;
  for (int i = 0; i < work.requests; ++i) {
    names.push_back(NameOf(i));
    memory.emplace_back(32 * 32, static_cast<float>(i));
  }
  std::vector<ronde_handle*> handles(names.size());
  Meter submitting(work), all(work);
  for (int step = 0; step < work.steps; ++step) {
    all.Time([&] {
      submitting.Time([&] {
        for (std::size_t i = 0; i < names.size(); ++i) {
          ronde_tensor tensor{nullptr, memory[i].data(), memory[i].data(), 0, 2, kShape};
          tensor.dtype = static_cast<std::int32_t>(DType::kFloat32);
          ronde_request request{};
          request.struct_size = sizeof request;
          request.op = static_cast<std::int32_t>(Op::kAllreduce);
          request.device = -1;
          request.prescale_factor = request.postscale_factor = 1;
          request.name = names[i].c_str();
          request.tensors = &tensor;
          request.num_tensors = 1;
          Require(ronde_submit(engine, &request, &handles[i]));
        }
      });
      for (ronde_handle* handle : handles) {
        ronde_wait(handle, -1);
        ronde_handle_free(handle);
      }
    });
    submitting.EndStep();
    all.EndStep();
  }
  submitting.Print("ronde_submit");
  all.Print("... until waited for");
  Require(ronde_shutdown(engine, nullptr));
}

Definition DefinitionOf(int request) {
  Definition definition;
  definition.name = NameOf(request);
  definition.tensors.push_back({definition.name, DType::kFloat32, {kShape[0], kShape[1]}});
  return definition;
}

NegotiatorConfig ConfigOf(int rank) {
  NegotiatorConfig config;
  config.rank = rank;
  config.parent = rank - 1;
  if (rank == 0) config.children = {1};
  config.parents = {-1, 0};
  config.host_names = {"h", "h"};
  config.stall_warning = std::chrono::seconds(60);
  return config;
}

void Negotiate(const Work& work) {
  std::unique_ptr<Negotiator> upper = CreateNegotiator(ConfigOf(0)), lower = CreateNegotiator(ConfigOf(1));
  const auto requests = static_cast<std::size_t>(work.requests);
  // As the engine does: a definition is kept and asked for again while it has no id.
  auto submit = [&](Negotiator& negotiator, std::vector<DefinitionPtr>* definitions) {
    for (std::size_t i = 0; i < requests; ++i) {
      DefinitionPtr& definition = (*definitions)[i];
      if (!definition || definition->id == 0) definition = negotiator.Intern(DefinitionOf(static_cast<int>(i)));
      negotiator.Submit(i + 1, definition, {}, Now());
    }
  };
  std::vector<DefinitionPtr> above(requests), below(requests);
  Actions reported, decided, heard;
  Meter root(work), member(work);
  std::size_t bytes_up = 0, bytes_down = 0;
  for (int step = 0; step < work.steps; ++step) {
    member.Time([&] {
      submit(*lower, &below);
      lower->Take(&reported);
    });
    root.Time([&] {
      submit(*upper, &above);
      for (const auto& [peer, message] : reported.messages) upper->Receive(1, message, Now());
      upper->Take(&decided);
    });
    member.Time([&] {
      for (const auto& [peer, message] : decided.messages) lower->Receive(0, message, Now());
      lower->Take(&heard);
    });
    bytes_up = reported.messages.at(0).second.size();
    bytes_down = decided.messages.at(0).second.size();
    root.Time([&] {
      for (const auto& batch : decided.batches) upper->Finished(batch.set, batch.number, Now());
    });
    if (decided.batches.at(0).entries.size() != requests || heard.batches.size() != 1) std::exit(1);
    root.EndStep();
    member.EndStep();
  }
  root.Print("negotiate, rank 0");
  member.Print("negotiate, rank 1");
  std::printf("%-24s %8.1f bytes up, %.1f down, per request\n", "  messages",
              static_cast<double>(bytes_up) / work.requests, static_cast<double>(bytes_down) / work.requests);
}

Batch BatchOf(const Work& work) {
  Batch batch;
  for (int i = 0; i < work.requests; ++i) {
    AgreedEntry entry;
    entry.definition = std::make_shared<const Definition>(DefinitionOf(i));
    batch.entries.push_back(std::move(entry));
  }
  return batch;
}

void PlanStage(const Work& work) {
  const Batch batch = BatchOf(work);
  Meter planning(work);
  for (int step = 0; step < work.steps; ++step) {
    std::size_t lists = 0;
    planning.Time([&] { lists = PlanFusion(batch, FusionLimits{64 << 20, false}, 2).size(); });
    if (lists != 1) std::exit(1);
    planning.EndStep();
  }
  planning.Print("plan");
}

class IdleBackend final : public Backend {
 public:
  bool Supports(Op, DType, int) const override { return true; }
  std::uint64_t Chunks(const FusedOperation&) const override { return 1; }
  void Run(const FusedOperation&, std::function<void(Result)> done) override { done(Ok()); }
  void Abort(const Result&) override {}
};

void Execute(const Work& work) {
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(std::make_unique<IdleBackend>());
  ExecutionCounters counters;
  Timeline timeline({0, 2, "h", 0, Timeline::kMaxWaiting, Log(LogLevel::kOff, false, "")});
  Executor executor({0, FusionLimits{64 << 20, false}, &backends, 0, [](SetId, std::uint64_t) {}, [](const Result&) {},
                     &counters, &timeline});
  auto members = std::make_shared<const std::vector<int>>(std::vector<int>{0, 1});
  const Batch batch = BatchOf(work);
  std::vector<float> memory(32 * 32);
  Meter executing(work);
  for (int step = 0; step < work.steps; ++step) {
    Job job;
    job.batch = batch;
    job.members = members;
    for (int i = 0; i < work.requests; ++i) {
      Request request;
      request.tensors.push_back({"", memory.data(), memory.data(), DType::kFloat32, {kShape[0], kShape[1]}});
      job.operations.push_back(std::make_shared<Operation>(std::move(request)));
    }
    executing.Time([&] {
      executor.Push(&job, /*wake=*/false);
      executor.TryRunOne();
    });
    if (!executor.WaitIdle(After(10))) std::exit(1);
    executing.EndStep();
  }
  executing.Print("plan and execute");
}

struct Stage {
  const char* name;
  void (*run)(const Work&);
};
constexpr Stage kStages[] = {{"submit", Submit}, {"negotiate", Negotiate}, {"plan", PlanStage}, {"execute", Execute}};

}  // namespace
}  // namespace ronde

// Not inlined, so that the compiler does not take free() for a mistake.
__attribute__((noinline)) void* operator new(std::size_t bytes) {
  ronde::allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

int main(int argc, char** argv) {
  ronde::Work work;
  std::string wanted = argc > 1 ? argv[1] : "all";
  if (argc > 2) work.requests = std::max(1, std::atoi(argv[2]));
  if (argc > 3) work.steps = std::max(5, std::atoi(argv[3]));
  bool found = false;
  for (const auto& stage : ronde::kStages) {
    if (wanted != "all" && wanted != stage.name) continue;
    stage.run(work);
    found = true;
  }
  if (!found) std::fprintf(stderr, "submission: there is no stage %s\n", wanted.c_str());
  return found ? 0 : 1;
}
