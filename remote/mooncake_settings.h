// SPDX-License-Identifier: Apache-2.0
// MooncakeSettings: where the master of a Mooncake store is, and how this engine is one of its clients.
//   mooncake://HOST:PORT[/NAME][?protocol=tcp&devices=…&metadata=P2PHANDSHAKE&local=HOST&segment=BYTES&buffer=BYTES]
// NAME begins every key. Mooncake has neither TLS nor passwords.
#pragma once

#include <string>

#include "base/status.h"

namespace torpor::remote {

struct MooncakeSettings {
  std::string host;
  uint16_t port = 0;
  std::string name;
  std::string protocol = "tcp";
  std::string devices;  // of RDMA
  std::string metadata = "P2PHANDSHAKE";
  std::string local;           // as the store's nodes see this host; empty: the address that the master is reached from
  uint64_t segment = 0;        // memory that this engine adds to the store
  uint64_t buffer = 16 << 20;  // of the client's own
};

bool is_mooncake(const std::string& url);
// kInvalidArgument names what is wrong.
Result<MooncakeSettings> mooncake_settings(const std::string& url);

}  // namespace torpor::remote
