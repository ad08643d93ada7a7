// SPDX-License-Identifier: Apache-2.0
// What an event costs who tells it: with a port of no ring, with one, two and four writers, and while a reader reads.
// Baseline: a queue behind a lock. Ceiling: reading the clock and storing 64 bytes; and each of these for itself, the
// ring without its clock, and one of the two atomic operations that it needs. Interleaved, medians of the rounds
// after one that only warms; nanoseconds an event of each writer.
#include <time.h>

#include <deque>
#include <functional>
#include <iostream>
#include <thread>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/event_ring.h"
#include "base/mutex.h"
#include "tools/bench/bench.h"

using namespace torpor;
using namespace torpor::bench;

namespace {

using Publish =
    std::function<void(uint64_t first, uint64_t count)>;  // a loop of its own for each: nothing is called anew

bool by_cpu = false;

// Of this thread, or of the clock on the wall.
double now() {
  timespec time{};
  (void)::clock_gettime(by_cpu ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

double nanoseconds(const Publish& publish, int writers, uint64_t events) {
  std::vector<double> each(static_cast<size_t>(writers));
  std::atomic<int> ready = 0;
  std::vector<std::thread> threads;
  for (int writer = 0; writer < writers; ++writer) {
    threads.emplace_back([&, writer] {
      ++ready;
      while (ready < writers) std::this_thread::yield();
      const double began = now();
      publish(static_cast<uint64_t>(writer) << 32, events);
      const double took = now() - began;
      each[static_cast<size_t>(writer)] = took * 1e9 / static_cast<double>(events);
    });
  }
  for (std::thread& thread : threads) thread.join();
  double sum = 0;
  for (const double one : each) sum += one;
  return sum / writers;
}

Event event_of(uint64_t i) {
  return {.type = EventType::kSlot, .from = 1, .to = 2, .request = static_cast<uint32_t>(i), .transfer = i, .a = i};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"What an event costs."};
  uint64_t events = 200'000;
  int rounds = 7;
  bool as_json = false;
  app.add_option("--events", events, "of each writer, a round");
  app.add_option("--rounds", rounds, "after one that only warms")->check(CLI::Range(1, 1000));
  app.add_flag("--cpu", by_cpu, "CPU time of the writers: where other programs use the machine");
  app.add_flag("--json", as_json, "print one JSON object");
  CLI11_PARSE(app, argc, argv);

  const auto ring = must(EventRing::in_memory(this_process("bench", 0, system_clock())));
  const EventPort off;
  const EventPort port(*ring, system_clock());
  Mutex mutex;
  std::deque<Event> queue;
  std::vector<Event> memory(4096);
  volatile uint64_t sum = 0;

  const Publish nothing = [&](uint64_t first, uint64_t count) {
    for (uint64_t i = first; i < first + count; ++i) {
      asm volatile("" ::"r"(i));
      (void)i;
    }
  };
  const Publish with_off = [&](uint64_t first, uint64_t count) {
    for (uint64_t i = first; i < first + count; ++i) {
      asm volatile("" ::"r"(i));
      (void)off.record(event_of(i));
    }
  };
  const Publish with_port = [&](uint64_t first, uint64_t count) {
    for (uint64_t i = first; i < first + count; ++i) {
      asm volatile("" ::"r"(i));
      (void)port.record(event_of(i));
    }
  };
  const Publish with_lock = [&](uint64_t first, uint64_t count) {
    for (uint64_t i = first; i < first + count; ++i) {
      Event event = event_of(i);
      event.time = system_clock().now().count();
      const MutexLock lock(mutex);
      queue.push_back(event);
      if (queue.size() > 65'536) queue.pop_front();
    }
  };
  const Publish with_store = [&](uint64_t first, uint64_t count) {
    for (uint64_t i = first; i < first + count; ++i) {
      Event event = event_of(i);
      event.time = system_clock().now().count();
      memory[i % memory.size()] = event;
      asm volatile("" ::"r"(memory.data()) : "memory");
    }
    sum = sum + memory[first % memory.size()].a;
  };
  // What the two above are made of.
  const Publish the_clock = [&](uint64_t first, uint64_t count) {
    int64_t last = 0;
    for (uint64_t i = first; i < first + count; ++i) {
      last = system_clock().now().count();
      asm volatile("" ::"r"(last));
    }
  };
  const Publish the_store = [&](uint64_t first, uint64_t count) {
    for (uint64_t i = first; i < first + count; ++i) {
      Event event = event_of(i);
      event.time = static_cast<int64_t>(i);
      memory[i % memory.size()] = event;
      asm volatile("" ::"r"(memory.data()) : "memory");
    }
  };
  const Publish the_ring = [&](uint64_t first, uint64_t count) {
    for (uint64_t i = first; i < first + count; ++i) {
      asm volatile("" ::"r"(i));
      (void)ring->record(event_of(i), static_cast<int64_t>(i));
    }
  };
  std::atomic<uint64_t> counter = 0;
  const Publish the_counter = [&](uint64_t first, uint64_t count) {
    for (uint64_t i = first; i < first + count; ++i) counter.fetch_add(1, std::memory_order_relaxed);
  };
  const auto with_reader = [&] {
    std::atomic<bool> done = false;
    std::thread reading([&] {
      EventReader reader(*ring, ring->last_sequence());
      std::vector<Event> read;
      while (!done) {
        reader.read(read);
        read.clear();
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    });
    const double result = nanoseconds(with_port, 1, events);
    done = true;
    reading.join();
    return result;
  };

  const std::vector<std::pair<std::string, std::function<double()>>> contestants = {
      {"empty_loop", [&] { return nanoseconds(nothing, 1, events); }},
      {"off", [&] { return nanoseconds(with_off, 1, events); }},
      {"clock_and_store", [&] { return nanoseconds(with_store, 1, events); }},
      {"clock_alone", [&] { return nanoseconds(the_clock, 1, events); }},
      {"store_alone", [&] { return nanoseconds(the_store, 1, events); }},
      {"ring_without_clock", [&] { return nanoseconds(the_ring, 1, events); }},
      {"atomic_add_alone", [&] { return nanoseconds(the_counter, 1, events); }},
      {"ring_1_writer", [&] { return nanoseconds(with_port, 1, events); }},
      {"ring_1_writer_and_reader", with_reader},
      {"ring_2_writers", [&] { return nanoseconds(with_port, 2, events); }},
      {"ring_4_writers", [&] { return nanoseconds(with_port, 4, events); }},
      {"lock_1_writer", [&] { return nanoseconds(with_lock, 1, events); }},
      {"lock_2_writers", [&] { return nanoseconds(with_lock, 2, events); }},
      {"lock_4_writers", [&] { return nanoseconds(with_lock, 4, events); }},
  };
  std::map<std::string, std::vector<double>> took;
  for (int round = 0; round <= rounds; ++round) {
    for (const auto& [name, run] : contestants) {
      const double one = run();
      if (round > 0) took[name].push_back(one);
    }
  }
  nlohmann::ordered_json json = {{"events", events}, {"rounds", rounds}};
  for (const auto& [name, run] : contestants) json["nanoseconds"][name] = median(took[name]);
  json["over_clock_and_store"] = median(took["ring_1_writer"]) - median(took["clock_and_store"]);
  if (as_json) {
    std::cout << json.dump(2) << '\n';
    return 0;
  }
  for (const auto& [name, run] : contestants) fmt::print("{:<26} {:>7.1f} ns an event\n", name, median(took[name]));
}
