// SPDX-License-Identifier: Apache-2.0
// ProgressFile: how far an operation is, and the wish to cancel it, between who asked for it and the processes that do
// it: a page of a file that all of them map. Those that work add up what they move; who watches reads, or cancels.
//
// Threads and processes: any, at any time; nothing waits. The numbers are shown and nothing else; all that depends on
// the page is whether to go on.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.h"
#include "base/progress.h"
#include "base/shared_page.h"
#include "base/status.h"

namespace torpor {

class ProgressFile {
 public:
  // A new file, 0600, that the caller removes. The clock counts for all who open the file on this machine.
  static Result<std::shared_ptr<ProgressFile>> create(const std::string& path, const Clock& clock = system_clock());
  // kCorruption: not such a file; kFailedPrecondition: of another user.
  static Result<std::shared_ptr<ProgressFile>> open(const std::string& path, const Clock& clock = system_clock());
  // For those that work: null where the path is empty, or, with a word in the log, where the file cannot be had (on
  // another machine). The operation is then not watched.
  static std::shared_ptr<ProgressFile> of_caller(const std::string& path, const Clock& clock = system_clock()) noexcept;

  // Those that work. The phase is a number of whoever runs the operation; 0: none yet.
  void begin_phase(uint8_t phase) noexcept;
  void expect(uint64_t bytes) noexcept;  // that will be moved, too
  void moved(uint64_t bytes) noexcept;
  Status check() const;  // kAborted once it was cancelled

  // Who watches. Bytes are those of all processes; the total grows whenever one finds more to move. Seconds count from
  // the first byte that was expected.
  uint8_t phase() const noexcept;
  Progress read() const noexcept;
  void cancel() noexcept;
  bool cancelled() const noexcept;

 private:
  struct Page;
  ProgressFile(std::unique_ptr<SharedPage> page, const Clock& clock);

  const std::unique_ptr<SharedPage> shared_;
  Page& page_;
  const Clock& clock_;
};

}  // namespace torpor
