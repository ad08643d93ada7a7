// SPDX-License-Identifier: Apache-2.0
// S3Store: an ObjectStore over the S3 protocol: AWS, Ceph, SeaweedFS and others. Library: libcurl (HTTP, TLS), pugixml.
//
// A key is created with "If-None-Match: *", which the servers grant to exactly one of several writers. What fails on
// the way (no connection, reset, 500, 502, 503, 429, 409) is tried again, with growing pauses of random length; an
// attempt ends when nothing arrived for `stalled_seconds`. A repeated put may find what its first attempt stored: it
// then says that the key was there already. So a call ends within attempts * stalled_seconds where a server takes
// connections and says nothing, within attempts * connect_seconds where there is none; `seconds_left` may be less.
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
  // What is left for the call, all attempts together: none is begun, and none goes on, when that is over. Empty: no
  // limit but those above.
  std::function<double()> seconds_left{};
};

// `stop` is asked now and then; empty: it never stops.
std::unique_ptr<ObjectStore> make_s3_store(std::string url, S3Settings settings, std::function<bool()> stop = {},
                                           S3Retries retries = {});

}  // namespace torpor::remote
