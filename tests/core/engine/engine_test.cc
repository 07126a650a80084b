// Engines as threads of one process over the local transport.
#include "engine/engine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <functional>
#include <thread>

#include "backends/host/factory.h"
#include "engine/json.h"
#include "transport/local/factory.h"

namespace ronde {
namespace {

struct Cluster {
  int size;
  bool segments = true;
  Options options;
  std::shared_ptr<LocalHub> hub;

  void Run(const std::function<void(Engine&, int)>& body) {
    options.chunk_bytes = 1024;
    options.ring_bytes = 16 * 1024;
    options.log_level = "off";
    hub = CreateLocalHub(size, 16 * 1024);
    std::vector<std::unique_ptr<Engine>> engines;
    for (int r = 0; r < size; ++r) {
      EngineConfig config;
      config.options = options;
      config.log = Log(LogLevel::kOff, false, "");
      config.topology.rank = r;
      config.topology.size = size;
      config.topology.host_ids.assign(size, "h");
      config.topology.host_names.assign(size, "h");
      config.mailbox = CreateLocalMailbox(hub, r);
      config.transport = CreateLocalTransport(hub, r);
      if (segments) config.segment = CreateLocalSegment(hub, r);
      HostBackendConfig host;
      host.chunk_bytes = 1024;
      host.segment = config.segment.get();
      host.transport = config.transport.get();
      config.backends.push_back(CreateHostBackend(host));
      engines.push_back(Engine::Create(std::move(config)));
    }
    std::vector<std::thread> threads;
    for (int r = 0; r < size; ++r) {
      threads.emplace_back([&, r] {
        body(*engines[r], r);
        engines[r]->Shutdown("");
      });
    }
    for (auto& t : threads) t.join();
  }
};

constexpr double kLimit = 20;

Request Reduce(const std::string& name, std::vector<float>& x, Reduction reduction = Reduction::kSum) {
  Request request;
  request.name = name;
  request.reduction = reduction;
  request.tensors.push_back({"", x.data(), x.data(), DType::kFloat32, {static_cast<std::int64_t>(x.size())}});
  return request;
}

std::shared_ptr<Operation> Submit(Engine& engine, Request request) {
  auto operation = std::make_shared<Operation>(std::move(request));
  Result result = engine.Submit(operation);
  if (!result.ok()) operation->Complete(result);
  return operation;
}

Result Wait(Engine& engine, const std::shared_ptr<Operation>& operation) {
  if (!engine.Wait(*operation, After(kLimit))) return Result(Code::kTimeout, "the test's own limit");
  return operation->result();
}

TEST(Engine, ManyTensorsInAnotherOrderOnEachRank) {
  for (int size : {1, 2, 4, 7}) {
    for (bool segments : {true, false}) {
      Cluster{size, segments, {}, {}}.Run([&](Engine& engine, int rank) {
        constexpr int kTensors = 40;
        std::vector<std::vector<float>> x(kTensors);
        std::vector<std::shared_ptr<Operation>> operations(kTensors);
        for (int k = 0; k < kTensors; ++k) {
          int t = (k * 7 + rank * 11) % kTensors;
          for (int i = 0; i < t * 37 % 900; ++i) x[t].push_back(static_cast<float>(rank * 1000 + t * 10 + i));
          operations[t] = Submit(engine, Reduce("t" + std::to_string(t), x[t]));
        }
        for (int t = 0; t < kTensors; ++t) {
          Result result = Wait(engine, operations[t]);
          ASSERT_TRUE(result.ok()) << result.message();
          for (std::size_t i = 0; i < x[t].size(); ++i) {
            float expected =
                1000.0f * size * (size - 1) / 2 + static_cast<float>(size) * (t * 10 + static_cast<float>(i));
            ASSERT_EQ(x[t][i], expected) << "size " << size << " tensor " << t << " element " << i;
          }
        }
      });
    }
  }
}

TEST(Engine, NamesThatChangeAndASmallCacheGiveTheSameResults) {
  for (int capacity : {0, 1, 3, 100}) {
    Cluster cluster{3, true, {}, {}};
    cluster.options.cache_capacity = capacity;
    cluster.Run([&](Engine& engine, int rank) {
      for (int step = 0; step < 12; ++step) {
        constexpr int kTensors = 8;
        std::vector<std::vector<float>> x(kTensors);
        std::vector<std::shared_ptr<Operation>> operations;
        for (int t = 0; t < kTensors; ++t) {
          // Every third step half of the tensors have another length, every fourth another reduction.
          x[t].resize(5 + (t % 2) * (step % 3 == 2));
          for (std::size_t i = 0; i < x[t].size(); ++i) {
            x[t][i] = static_cast<float>(100 * rank + 10 * t + static_cast<int>(i) + step);
          }
          Request request = Reduce("t" + std::to_string(t), x[t], step % 4 == 3 ? Reduction::kMax : Reduction::kSum);
          if (t == 3) request.name.clear();
          operations.push_back(Submit(engine, std::move(request)));
        }
        for (int t = 0; t < kTensors; ++t) {
          Result result = Wait(engine, operations[t]);
          ASSERT_TRUE(result.ok()) << result.message();
          for (std::size_t i = 0; i < x[t].size(); ++i) {
            const auto own = static_cast<float>(10 * t + static_cast<int>(i) + step);
            ASSERT_EQ(x[t][i], step % 4 == 3 ? 200 + own : 300 + 3 * own) << "capacity " << capacity << " tensor " << t;
          }
        }
      }
    });
  }
}

TEST(Engine, AMismatchIsTheSameErrorEverywhereAndTheEngineGoesOn) {
  std::vector<std::string> texts(3);
  Cluster{3, true, {}, {}}.Run([&](Engine& engine, int rank) {
    std::vector<float> x(rank == 1 ? 5 : 4, 1.0f);
    texts[rank] = Wait(engine, Submit(engine, Reduce("x", x))).message();
    std::vector<float> y(3, static_cast<float>(rank));
    ASSERT_TRUE(Wait(engine, Submit(engine, Reduce("y", y))).ok());
    EXPECT_EQ(y[0], 3.0f);
  });
  EXPECT_EQ(texts[0], "allreduce 'x': ranks disagree about shape: [4] on ranks 0, 2; [5] on rank 1");
  EXPECT_EQ(texts[0], texts[1]);
  EXPECT_EQ(texts[0], texts[2]);
}

TEST(Engine, ProcessSetsOverlapAndRunInOneOrder) {
  Cluster{4, true, {}, {}}.Run([&](Engine& engine, int rank) {
    std::vector<std::vector<int>> sets = {{0, 1}, {1, 2, 3}, {0, 3}, {0, 1, 2, 3}};
    std::vector<SetId> ids;
    for (const auto& ranks : sets) {
      Request add;
      add.op = Op::kAddProcessSet;
      add.name = "set" + std::to_string(ids.size());
      add.ranks = ranks;
      auto operation = Submit(engine, std::move(add));
      ASSERT_TRUE(Wait(engine, operation).ok());
      ids.push_back(static_cast<SetId>(operation->value));
    }
    EXPECT_EQ(ids[3], kGlobalSet);
    for (int round = 0; round < 50; ++round) {
      std::vector<std::pair<std::size_t, std::shared_ptr<Operation>>> operations;
      std::vector<std::vector<float>> data(sets.size());
      for (std::size_t s = 0; s < sets.size(); ++s) {
        std::size_t set = (s + rank) % sets.size();
        if (std::find(sets[set].begin(), sets[set].end(), rank) == sets[set].end()) continue;
        data[set].assign(static_cast<std::size_t>(1 + round * 53 % 2000), static_cast<float>(rank + round));
        Request request = Reduce("x", data[set]);
        request.set = ids[set];
        operations.emplace_back(set, Submit(engine, std::move(request)));
      }
      for (auto& [set, operation] : operations) {
        ASSERT_TRUE(Wait(engine, operation).ok());
        float expected = 0;
        for (int r : sets[set]) expected += static_cast<float>(r + round);
        for (float v : data[set]) ASSERT_EQ(v, expected);
      }
    }
    if (rank == 3) {
      std::vector<float> x(1);
      Request request = Reduce("no", x);
      request.set = ids[0];
      EXPECT_EQ(Wait(engine, Submit(engine, std::move(request))).code(), Code::kArgument);
    }
  });
}

TEST(Engine, RaggedOperationsAllocateTheirOutputs) {
  Cluster{3, true, {}, {}}.Run([&](Engine& engine, int rank) {
    std::vector<float> rows(static_cast<std::size_t>(rank) * 2, static_cast<float>(rank));
    Request gather;
    gather.op = Op::kAllgather;
    gather.tensors.push_back({"", rows.data(), nullptr, DType::kFloat32, {rank, 2}});
    auto operation = Submit(engine, std::move(gather));
    ASSERT_TRUE(Wait(engine, operation).ok());
    EXPECT_EQ(operation->outputs[0].shape, (Shape{3, 2}));
    const auto* out = static_cast<const float*>(operation->outputs[0].data);
    EXPECT_EQ(std::vector<float>(out, out + 6), (std::vector<float>{1, 1, 2, 2, 2, 2}));

    std::vector<std::int32_t> sent;  // rank sends d rows to member d, each holding 10 * rank + d
    for (int d = 0; d < 3; ++d) sent.insert(sent.end(), d, 10 * rank + d);
    Request exchange;
    exchange.op = Op::kAlltoall;
    exchange.splits = {0, 1, 2};
    exchange.tensors.push_back({"", sent.data(), nullptr, DType::kInt32, {3}});
    operation = Submit(engine, std::move(exchange));
    ASSERT_TRUE(Wait(engine, operation).ok());
    EXPECT_EQ(operation->outputs[0].received_splits, std::vector<std::int64_t>(3, rank));
    const auto* got = static_cast<const std::int32_t*>(operation->outputs[0].data);
    std::vector<std::int32_t> expected;
    for (int s = 0; s < 3; ++s) expected.insert(expected.end(), rank, 10 * s + rank);
    EXPECT_EQ(std::vector<std::int32_t>(got, got + 3 * rank), expected);
  });
}

TEST(Engine, JoinReleasesAllAndNamesTheLast) {
  Cluster{2, true, {}, {}}.Run([&](Engine& engine, int rank) {
    for (int step = 0; step < (rank == 0 ? 3 : 5); ++step) {
      std::vector<float> x(1, 4.0f);
      ASSERT_TRUE(Wait(engine, Submit(engine, Reduce("x", x, Reduction::kMin))).ok());
      EXPECT_EQ(x[0], 4.0f);
    }
    Request join;
    join.op = Op::kJoin;
    auto operation = Submit(engine, std::move(join));
    ASSERT_TRUE(Wait(engine, operation).ok());
    EXPECT_EQ(operation->value, 1);
    std::vector<float> x(1, static_cast<float>(rank + 1));
    ASSERT_TRUE(Wait(engine, Submit(engine, Reduce("", x, Reduction::kAverage))).ok());
    EXPECT_EQ(x[0], 1.5f);
  });
}

TEST(Engine, ADeadRankEndsEveryPendingAndLaterOperation) {
  Cluster cluster{3, true, {}, {}};
  std::atomic<int> ready{0};
  cluster.Run([&](Engine& engine, int rank) {
    std::vector<float> x(1);
    ++ready;
    while (ready < 3) std::this_thread::yield();
    if (rank == 1) {
      DisconnectLocal(*cluster.hub, 1);
      return;
    }
    auto start = Now();
    Result result = Wait(engine, Submit(engine, Reduce("x", x)));
    EXPECT_EQ(result.code(), Code::kPeerLost) << result.message();
    EXPECT_NE(result.message().find("rank 1"), std::string::npos) << result.message();
    EXPECT_LT(Seconds(Now() - start), 1.0);
    EXPECT_EQ(Wait(engine, Submit(engine, Reduce("y", x))).code(), Code::kPeerLost);
  });
}

TEST(Engine, AFailureOfOneRanksProgramReachesTheOthers) {
  Cluster{3, true, {}, {}}.Run([&](Engine& engine, int rank) {
    if (rank == 2) return engine.Shutdown("ValueError: boom");
    std::vector<float> x(1);
    Result result = Wait(engine, Submit(engine, Reduce("x", x)));
    EXPECT_EQ(result.message(), "rank 2 (host h) failed: ValueError: boom");
  });
}

TEST(Engine, ShutdownFailsWhatPendsHere) {
  Cluster{2, true, {}, {}}.Run([&](Engine& engine, int rank) {
    std::vector<float> x(1);
    if (rank == 0) {
      auto pending = Submit(engine, Reduce("x", x));
      engine.Shutdown("");
      EXPECT_EQ(Wait(engine, pending).code(), Code::kShutdown);
      EXPECT_EQ(Wait(engine, Submit(engine, Reduce("z", x))).code(), Code::kShutdown);
    }
  });
}

TEST(Engine, LeavingWithAnOperationUnderWayIsAnErrorForTheOthersNeverAWrongResult) {
  for (int round = 0; round < 60; ++round) {
    int leaver = round % 2;
    Cluster{2, true, {}, {}}.Run([&](Engine& engine, int rank) {
      std::vector<float> x(1000, static_cast<float>(rank + 1));
      auto operation = Submit(engine, Reduce("x", x));
      if (rank == leaver) {
        std::this_thread::sleep_for(std::chrono::microseconds(round * 3));
        engine.Shutdown("");
      }
      Result result = Wait(engine, operation);
      EXPECT_NE(result.code(), Code::kTimeout);
      if (result.ok()) {
        for (float v : x) ASSERT_EQ(v, 3.0f);
      }
    });
  }
}

TEST(Engine, DoneFiresExactlyOnceWithoutALock) {
  std::atomic<int> fired{0};
  Cluster{2, true, {}, {}}.Run([&](Engine& engine, int) {
    std::vector<std::vector<float>> x(100, std::vector<float>(3));
    std::vector<std::shared_ptr<Operation>> operations;
    for (std::size_t t = 0; t < x.size(); ++t) {
      Request request = Reduce("t" + std::to_string(t), x[t]);
      request.done = [&](const Result& result) {
        EXPECT_TRUE(result.ok());
        std::vector<int> ignored = engine.Members(kGlobalSet).value();  // takes the engine's lock
        ++fired;
      };
      operations.push_back(Submit(engine, std::move(request)));
    }
    for (auto& operation : operations) ASSERT_TRUE(Wait(engine, operation).ok());
  });
  EXPECT_EQ(fired, 200);
}

TEST(Engine, WrongRequestsAreRefusedAtTheCall) {
  Cluster{2, true, {}, {}}.Run([&](Engine& engine, int rank) {
    if (rank == 1) return;
    std::vector<float> x(4);
    auto code = [&](const std::function<void(Request&)>& change) {
      Request request = Reduce("x", x);
      change(request);
      return engine.Submit(std::make_shared<Operation>(std::move(request))).code();
    };
    EXPECT_EQ(code([](Request& r) { r.set = 9; }), Code::kArgument);
    EXPECT_EQ(code([](Request& r) { r.tensors.clear(); }), Code::kArgument);
    EXPECT_EQ(code([](Request& r) { r.tensors[0].input = nullptr; }), Code::kArgument);
    EXPECT_EQ(code([](Request& r) { r.tensors[0].shape = {-1}; }), Code::kArgument);
    EXPECT_EQ(code([](Request& r) { r.device = 3; }), Code::kArgument);
    EXPECT_EQ(code([](Request& r) { r.op = Op::kReducescatter, r.reduction = Reduction::kAdasum; }), Code::kArgument);
    EXPECT_EQ(code([](Request& r) { r.op = Op::kBroadcast, r.root = 2; }), Code::kArgument);
    EXPECT_EQ(code([](Request& r) { r.op = Op::kAllgather, r.tensors[0].shape = {}; }), Code::kArgument);
    EXPECT_EQ(code([](Request& r) { r.op = Op::kAlltoall, r.splits = {1, 2}; }), Code::kArgument);
    EXPECT_EQ(code([](Request& r) { r.op = Op::kAlltoall, r.splits = {5, -1}; }), Code::kArgument);
    EXPECT_EQ(code([](Request& r) { r.op = Op::kAlltoall, r.tensors[0].shape = {3}; }), Code::kArgument);
  });
}

std::int64_t Metric(const Engine& engine, const std::string& name) {
  for (const auto& [row, value] : engine.Metrics()) {
    if (row == name) return value;
  }
  return -1;
}

TEST(Engine, MetricsCountWhatRanAndWhereTheTimeWent) {
  for (bool segments : {true, false}) {
    Cluster{3, segments, {}, {}}.Run([&](Engine& engine, int rank) {
      constexpr int kRounds = 20;
      std::vector<float> small(10, 1.0f), large(10'000, 2.0f);
      for (int i = 0; i < kRounds; ++i) {
        if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        auto first = Submit(engine, Reduce("small", small));
        ASSERT_TRUE(Wait(engine, first).ok());
        ASSERT_TRUE(Wait(engine, Submit(engine, Reduce("large", large))).ok());
      }
      std::vector<float> wrong(static_cast<std::size_t>(4 + rank), 1.0f);
      ASSERT_FALSE(Wait(engine, Submit(engine, Reduce("wrong", wrong))).ok());
      EXPECT_EQ(Metric(engine, "operations"), 2 * kRounds + 1);
      EXPECT_EQ(Metric(engine, "ops.allreduce.operations"), 2 * kRounds + 1);
      EXPECT_EQ(Metric(engine, "ops.broadcast.operations"), 0);
      EXPECT_EQ(Metric(engine, "failed"), 1);
      EXPECT_EQ(Metric(engine, "tensors"), 2 * kRounds);
      EXPECT_EQ(Metric(engine, "bytes"), kRounds * 4 * (10 + 10'000));
      EXPECT_EQ(Metric(engine, "lists"), 2 * kRounds);  // each waited for, so none is fused
      EXPECT_EQ(Metric(engine, "batches"), 2 * kRounds + 1);
      EXPECT_EQ(Metric(engine, "cache.misses"), 3);
      EXPECT_EQ(Metric(engine, "cache.hits"), 2 * kRounds - 2);
      EXPECT_EQ(Metric(engine, "stalls"), 0);
      // The slow rank makes the others' negotiations long.
      const double negotiate = static_cast<double>(Metric(engine, "nanoseconds.negotiate")) / 1e6;
      if (rank != 1) {
        EXPECT_GT(negotiate, kRounds * 1.0);
      }
      std::int64_t phases = 0;
      for (const char* phase : {"pack", "network", "reduce", "unpack"}) {
        std::int64_t time = Metric(engine, std::string("nanoseconds.") + phase);
        EXPECT_GT(time, 0) << phase;
        phases += time;
      }
      EXPECT_LE(phases, Metric(engine, "nanoseconds.run"));
    });
  }
}

TEST(Engine, TimelinesOfAllRanks) {
  const std::string folder = ::testing::TempDir() + "ronde_engines_" + std::to_string(getpid());
  std::filesystem::create_directory(folder);
  Options options;
  options.timeline_all_ranks = true;
  std::array<std::atomic<int>, 3> arrived{};
  auto meet = [&](std::size_t place) {  // so that no rank hears of what others do before it starts or after it stops
    ++arrived[place];
    for (Deadline limit = After(kLimit); arrived[place] < 3 && Now() < limit;) std::this_thread::yield();
  };
  Cluster{3, true, options, {}}.Run([&](Engine& engine, int rank) {
    ASSERT_TRUE(engine.StartTimeline(folder + "/t.json", false).ok());
    meet(0);
    std::vector<std::vector<float>> x(4, std::vector<float>(20, static_cast<float>(rank)));
    std::vector<std::shared_ptr<Operation>> operations;
    for (std::size_t t = 0; t < x.size(); ++t) {
      // One of them unnamed.
      operations.push_back(Submit(engine, Reduce(t == 0 ? "" : "odd \"" + std::to_string(t), x[t])));
    }
    for (auto& operation : operations) ASSERT_TRUE(Wait(engine, operation).ok());
    EXPECT_EQ(x[3][7], 3.0f);
    // What is told of a batch comes after its operations have ended: certainly, once a later one has.
    std::vector<float> last(3);
    ASSERT_TRUE(Wait(engine, Submit(engine, Reduce("last", last))).ok());
    meet(1);
    engine.StopTimeline();
    meet(2);
    std::vector<float> later(3);
    ASSERT_TRUE(Wait(engine, Submit(engine, Reduce("later", later))).ok());
  });
  for (int rank = 0; rank < 3; ++rank) {
    const std::string path = folder + "/t.rank" + std::to_string(rank) + ".json";
    EXPECT_TRUE(testing::IsJson(testing::ReadFile(path)));
    auto events = testing::Events(path);
    for (const char* name : {"allreduce #0", "odd \\\"1", "odd \\\"2", "odd \\\"3"}) {
      for (const char* category : {"negotiate", "queue", "run"}) {
        for (const char* phase : {"b", "e"}) {
          std::string part = std::string("\"name\":\"") + name + "\",\"cat\":\"" + category + "\",\"ph\":\"" + phase;
          EXPECT_EQ(testing::Count(events, part), 1u) << rank << " " << part;
        }
      }
    }
    EXPECT_EQ(testing::Count(events, "later"), 0u);
    // Rank 0 leads the host, so it hears everybody; the others hear themselves.
    for (int heard = 0; heard < 3; ++heard) {
      EXPECT_EQ(testing::Count(events, "\"ready: rank " + std::to_string(heard) + "\""),
                rank == 0 || rank == heard ? 5u : 0u);
    }
    EXPECT_GE(testing::Count(events, "\"cat\":\"batch\""), 1u);
    EXPECT_GE(testing::Count(events, "\"name\":\"reduce\",\"cat\":\"phase\""), 1u);
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace ronde
