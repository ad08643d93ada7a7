// SPDX-License-Identifier: Apache-2.0
// Recordings of vLLM by each version of the schema, as they were written: whoever changes what events mean breaks them.
// 1.0 has all but offloading; 1.2 has the connector, a sleep, memory and keys; 1.5 blocks of host memory one by
// one; 1.6 cached tokens.
#include <fstream>

#include "console/engine_view.h"
#include "console/event_export.h"
#include "console/event_files.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::console {
namespace {

using test::value_of;

struct Golden {
  const char* version;
  const char* types;  // whose lines are kept, too; empty: all
};
void PrintTo(const Golden& golden, std::ostream* out) { *out << golden.version; }

class GoldenRecording : public testing::TestWithParam<Golden> {
 protected:
  std::string folder() const { return TORPOR_SOURCE_DIR "/tests/golden/events-" + std::string(GetParam().version); }
  // Its tree may be a clone, whose modes follow a umask: read by a path that need not be the user's alone.
  SourceEvents recording() {
    const std::string path = temporary_ / "core.events";
    boost::filesystem::copy_file(folder() + "/core.events", path);
    boost::filesystem::permissions(path, boost::filesystem::owner_read | boost::filesystem::owner_write);
    std::vector<SourceEvents> found = value_of(read_events(linux_file_system(), path));
    EXPECT_EQ(found.size(), 1u);
    return std::move(found[0]);
  }
  const test::TemporaryDirectory temporary_;
};
INSTANTIATE_TEST_SUITE_P(Versions, GoldenRecording,
                         testing::Values(Golden{"1.0", ""}, Golden{"1.1", "stop,control,input"},
                                         Golden{"1.2", "memory,hit,tier"}, Golden{"1.3", "stop,control,hit,candidate"},
                                         Golden{"1.4", "control,operation,phase"}, Golden{"1.5", "registered,dropped"},
                                         Golden{"1.6", "cached"}));

TEST_P(GoldenRecording, SaysWhatItSaid) {
  const SourceEvents found = recording();
  EXPECT_EQ(found.damaged, 0u);
  EngineView view;
  for (const Event& event : found.events) view.apply(event);
  EXPECT_EQ(view.unknown(), 0u);
  std::ifstream expected(folder() + "/console.json");
  EXPECT_EQ(view.to_json(), nlohmann::ordered_json::parse(expected)) << view.to_json().dump(1);
}

TEST_P(GoldenRecording, IsWrittenAsLinesAsItWas) {
  const std::vector<SourceEvents> sources = {recording()};
  std::string text;
  EventExport writer = value_of(EventExport::create({.types = GetParam().types}));
  ASSERT_TRUE(writer.write(sources, EventExport::Format::kNdjson, [&](std::string_view more) {
    text += more;
    return true;
  }));
  std::ifstream expected(folder() + "/events.ndjson");
  EXPECT_EQ(text, std::string(std::istreambuf_iterator<char>(expected), {}));
}

}  // namespace
}  // namespace torpor::console
