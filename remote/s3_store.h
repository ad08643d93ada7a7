// SPDX-License-Identifier: Apache-2.0
// S3Store: an ObjectStore over the S3 protocol: AWS, Ceph, SeaweedFS and others. Libraries: libcurl (HTTP, TLS),
// pugixml.
//
// A key is created with "If-None-Match: *", which servers grant to exactly one of several writers. Transient failures
// (no connection, reset, 408, 409, 429, 500, 502, 503, 504, RequestTimeout) are retried after pauses of random, growing
// length. An attempt ends when nothing arrived for `stalled_seconds`. A repeated put may find the object of its first
// attempt; it then returns that the key existed. So a call takes at most attempts * stalled_seconds if the server
// accepts connections and says nothing, and attempts * connect_seconds if there is no server; or less with
// `seconds_left`.
//
// Threads and errors: as ObjectStore.
#pragma once

#include <functional>
#include <memory>

#include "remote/object_store.h"
#include "remote/s3_settings.h"

namespace torpor::remote {

struct S3Retries {
  int attempts = 5;
  double first_pause_seconds = 0.2;  // at most; doubles with each attempt
  int connect_seconds = 10;
  int stalled_seconds = 30;
  // Returns the time left for the call, all attempts together: after that no attempt begins or continues. Empty: only
  // the limits above.
  std::function<double()> seconds_left{};
};

// `stop` is called now and then; if it returns true, the call ends with kAborted. Empty: never.
std::unique_ptr<ObjectStore> make_s3_store(std::string url, S3Settings settings, std::function<bool()> stop = {},
                                           S3Retries retries = {});

}  // namespace torpor::remote
