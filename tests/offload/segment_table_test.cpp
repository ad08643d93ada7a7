// SPDX-License-Identifier: Apache-2.0
// Which segments take records, and what is counted, without a file.
#include "offload/segment_table.h"

#include "tests/support/results.h"

namespace torpor {
namespace {

using test::value_of;

constexpr int32_t kSlots = 4;
constexpr uint64_t kCapacity = 16 * kPage;

class SegmentTableTest : public ::testing::Test {
 protected:
  SegmentTableTest() { table_.open_space(1, Digest{}); }

  SegmentPtr opened(uint64_t number) {
    SegmentPtr segment = value_of(table_.begin(number, 1));
    table_.open(*segment);
    return segment;
  }
  // As SegmentBatch does: a record of one page in each of the first `count` slots.
  static void fill(Segment& segment, uint32_t count) {
    for (uint32_t position = 0; position < count; ++position) {
      const SegmentRecord record{.position = position, .offset = segment.end, .stored = kPage, .bytes = kPage};
      segment.places[position] = {record, Segment::Use::kStored};
      segment.end = record_end(record);
      ++segment.used;
    }
  }

  SegmentTable table_{{.slots = kSlots, .capacity = kCapacity, .budget_bytes = 3 * kCapacity, .first_number = 2}};
};

TEST_F(SegmentTableTest, ASegmentIsBegunWithinNumbersNamespacesAndBudget) {
  EXPECT_FAILS(table_.begin(1, 1), Code::kFailedPrecondition, "seg-000001");  // an earlier process's
  EXPECT_FAILS(table_.begin(2, 7), Code::kFailedPrecondition, "namespace 7");
  for (const uint64_t number : {2, 3, 4}) opened(number);
  EXPECT_EQ(table_.held_bytes(), 3 * kCapacity);
  EXPECT_FAILS(table_.begin(5, 1), Code::kResourceExhausted, "budget");
  table_.forget(*table_.find(3));
  EXPECT_SUCCEEDS(table_.begin(5, 1));
}

TEST_F(SegmentTableTest, ACancelledSegmentMayBeBegunAgainUnlessItWasDropped) {
  table_.cancel(value_of(table_.begin(2, 1)));
  EXPECT_EQ(table_.find(2), nullptr);
  EXPECT_EQ(table_.held_bytes(), 0u);
  const SegmentPtr dropped = value_of(table_.begin(2, 1));
  EXPECT_TRUE(table_.drop(2 * kSlots, 3 * kSlots).is_whole);
  table_.cancel(dropped);
  EXPECT_NE(table_.find(2), nullptr);
  EXPECT_TRUE(table_.take_ended().empty());
}

TEST_F(SegmentTableTest, AFullSegmentIsCutOnce) {
  const SegmentPtr segment = opened(2);
  EXPECT_TRUE(table_.take_ended().empty());
  fill(*segment, kSlots);
  segment->under_way.insert(kPage);
  EXPECT_TRUE(table_.take_ended().empty());  // a batch is being written
  segment->under_way.clear();
  const std::vector<SegmentTable::Ended> ended = table_.take_ended();
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].end, segment->end);
  table_.cut(*segment, ended[0].end);
  EXPECT_EQ(table_.held_bytes(), segment->end);
  EXPECT_TRUE(table_.take_ended().empty());
}

TEST_F(SegmentTableTest, SegmentsFarBehindTheNewestEnd) {
  const SegmentPtr old = opened(2);
  opened(2 + SegmentTable::kOpenSegments);
  EXPECT_EQ(old->state, Segment::State::kEnded);
  EXPECT_FAILS(table_.begin(2, 1), Code::kFailedPrecondition, "seg-000002");
}

TEST_F(SegmentTableTest, ADropTakesOneSegmentAtATime) {
  fill(*opened(2), 2);
  fill(*opened(4), kSlots);
  SegmentTable::Drop done = table_.drop(2 * kSlots + 1, 5 * kSlots);  // a part of the first
  EXPECT_FALSE(done.is_whole);
  EXPECT_EQ(done.next, 3 * kSlots);
  EXPECT_EQ(table_.dropped_bytes(), kPage);
  EXPECT_NE(table_.find_record(2 * kSlots).segment, nullptr);
  EXPECT_EQ(table_.find_record(2 * kSlots + 1).segment, nullptr);
  EXPECT_EQ(table_.find(2)->used, static_cast<size_t>(kSlots));  // dropped slots take no record

  done = table_.drop(done.next, 5 * kSlots);  // skips the segment that does not exist
  EXPECT_TRUE(done.is_whole);
  EXPECT_EQ(done.number, 4u);
  EXPECT_EQ(done.next, 5 * kSlots);
  EXPECT_EQ(table_.dropped_bytes(), (1 + kSlots) * kPage);
  EXPECT_EQ(table_.drop(5 * kSlots, 1000 * kSlots).next, 1000 * kSlots);
}

TEST_F(SegmentTableTest, RecordsBehindABrokenBatchAreDroppedByASync) {
  const SegmentPtr segment = opened(2);
  fill(*segment, 3);
  segment->broken_at = segment->places[1].record.offset;
  EXPECT_EQ(table_.synced(*segment, segment->broken_at), 2u);
  EXPECT_NE(table_.find_record(2 * kSlots).segment, nullptr);
  EXPECT_EQ(table_.find_record(2 * kSlots + 1).segment, nullptr);
  EXPECT_EQ(segment->durable_end, segment->broken_at);
}

}  // namespace
}  // namespace torpor
