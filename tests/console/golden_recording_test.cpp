// A recording of vLLM by schema version 1.0, as it was written: whoever changes what events mean breaks it.
#include <fstream>

#include "console/engine_view.h"
#include "console/event_export.h"
#include "console/event_files.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::console {
namespace {

using test::value_of;

constexpr const char* kGolden = TORPOR_SOURCE_DIR "/tests/golden/events-1.0";

// Its tree may be a clone, whose modes follow a umask: read by a path that need not be the user's alone.
SourceEvents golden(const test::TemporaryDirectory& into) {
  boost::filesystem::copy_file(std::string(kGolden) + "/core.events", into / "core.events");
  boost::filesystem::permissions(into / "core.events", boost::filesystem::owner_read | boost::filesystem::owner_write);
  std::vector<SourceEvents> found = value_of(read_events(linux_file_system(), into / "core.events"));
  EXPECT_EQ(found.size(), 1u);
  return std::move(found[0]);
}

TEST(GoldenRecording, SaysWhatItSaid) {
  const test::TemporaryDirectory temporary;
  const SourceEvents found = golden(temporary);
  EXPECT_EQ(found.damaged, 0u);
  EngineView view;
  for (const Event& event : found.events) view.apply(event);
  EXPECT_EQ(view.unknown(), 0u);
  std::ifstream expected(std::string(kGolden) + "/console.json");
  EXPECT_EQ(view.to_json(), nlohmann::ordered_json::parse(expected));
}

TEST(GoldenRecording, IsWrittenAsLinesAsItWas) {
  const test::TemporaryDirectory temporary;
  const std::vector<SourceEvents> sources = {golden(temporary)};
  std::string text;
  ASSERT_TRUE(
      value_of(EventExport::create({})).write(sources, EventExport::Format::kNdjson, [&](std::string_view more) {
        text += more;
        return true;
      }));
  std::ifstream expected(std::string(kGolden) + "/events.ndjson");
  EXPECT_EQ(text, std::string(std::istreambuf_iterator<char>(expected), {}));
}

}  // namespace
}  // namespace torpor::console
