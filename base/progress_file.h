// SPDX-License-Identifier: Apache-2.0
// ProgressFile: the progress of an operation, shared between the process that started it and the processes that do the
// work, with a request to cancel. It is a page of a file that all of them map. Workers add the bytes that they moved;
// observers read, or cancel.
//
// Threads and processes: any, at any time; nothing blocks. The numbers are only shown. Cancellation is the only content
// that changes what a process does.
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
  // Make a new file, 0600; the caller removes it. `clock`: the same for all processes that open the file, all on this
  // machine.
  static Result<std::shared_ptr<ProgressFile>> create(const std::string& path, const Clock& clock = system_clock());
  // Open a file. kCorruption: it is no such file. kFailedPrecondition: another user can write to it.
  static Result<std::shared_ptr<ProgressFile>> open(const std::string& path, const Clock& clock = system_clock());
  // For workers: open the caller's file. Return null if the path is empty. If the file cannot be opened (on another
  // machine), log that and return null; nobody then sees the progress.
  static std::shared_ptr<ProgressFile> of_caller(const std::string& path, const Clock& clock = system_clock()) noexcept;

  // For workers. The operation numbers its phases; 0: none has begun.
  void begin_phase(uint8_t phase) noexcept;
  void expect(uint64_t bytes) noexcept;  // add to the total that will be moved
  void moved(uint64_t bytes) noexcept;
  Status check() const;  // kAborted: an observer has cancelled

  // For observers. Bytes are sums over all processes. The total grows whenever a process finds more to move. Seconds
  // count from the first call of expect().
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
