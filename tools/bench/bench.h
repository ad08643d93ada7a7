// What the benchmark programs share: errors end them, times are medians of rounds after one that only warms.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "base/status.h"

namespace torpor::bench {

template <class T>
T must(Result<T> result) {
  if (result) return std::move(*result);
  fmt::print(stderr, "error: {}\n", result.error().to_string());
  std::exit(2);
}
inline void must(const Status& status) {
  if (status) return;
  fmt::print(stderr, "error: {}\n", status.error().to_string());
  std::exit(2);
}

inline double seconds(const std::function<void()>& work) {
  const auto began = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace torpor::bench
