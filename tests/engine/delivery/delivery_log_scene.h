// SPDX-License-Identifier: Apache-2.0
// A delivery log in a directory of its own, with clocks that a test moves, and short words for what it records.
#pragma once

#include <fstream>

#include <boost/filesystem.hpp>

#include "engine/delivery/delivery_log.h"
#include "tests/support/example_state.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/two_clocks.h"

namespace torpor::test {

inline Answer asked(const std::string& id, std::string response = "", std::string tenant = "", int32_t choice = 0) {
  Answer answer{.request = test::example_request(id, RequestStatus::kWaiting, 3, 0, 0),
                .response = response.empty() ? "response-" + id : std::move(response),
                .tenant = std::move(tenant),
                .choice = choice};
  answer.front.data = std::string("front end");
  return answer;
}

inline AnswerStep given(std::string id, uint32_t at, std::vector<int32_t> tokens, std::string text) {
  return {.id = std::move(id), .at = at, .tokens = std::move(tokens), .text = std::move(text)};
}

inline AnswerStep ended(std::string id, uint32_t at) {
  return {.id = std::move(id),
          .at = at,
          .state = AnswerState::kFinished,
          .finish_reason = "stop",
          .stop_reason = {int64_t{7}}};
}

class DeliveryLogTest : public ::testing::Test {
 protected:
  DeliveryLogOptions options() {
    return {.clock = &clock_, .directory = directory_ / "answers", .engine = {{"model", "a"}}, .own_thread = false};
  }
  std::unique_ptr<DeliveryLog> open(DeliveryLogOptions options) {
    return value_of(DeliveryLog::open(linux_file_system(), std::move(options)));
  }
  std::unique_ptr<DeliveryLog> open() { return open(options()); }
  // What the thread of the answers does.
  static Status rotate_if_due(DeliveryLog& answers) { return answers.rotation_due() ? answers.rotate() : ok(); }
  std::string file() const { return file_in(directory_ / "answers"); }
  static std::string file_in(const std::string& directory) {
    std::string found;
    for (const auto& entry : boost::filesystem::directory_iterator(directory)) {
      if (entry.path().filename().string().starts_with("answers-")) found = entry.path().string();
    }
    return found;
  }
  static Bytes read(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  static void write(const std::string& path, const Bytes& bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  }

  test::TemporaryDirectory directory_;
  TwoClocks clock_;
};

}  // namespace torpor::test
