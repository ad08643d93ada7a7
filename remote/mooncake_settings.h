// SPDX-License-Identifier: Apache-2.0
// MooncakeSettings: the address of a Mooncake store's master, and how this engine joins it as a client.
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
  std::string devices;  // for RDMA
  std::string metadata = "P2PHANDSHAKE";
  std::string local;           // this host's address for the store's nodes; empty: the one that reaches the master
  uint64_t segment = 0;        // bytes of memory that this engine adds to the store
  uint64_t buffer = 16 << 20;  // bytes of memory of the client itself
};

bool is_mooncake(const std::string& url);
// Read a URL. kInvalidArgument names what is wrong.
Result<MooncakeSettings> mooncake_settings(const std::string& url);

}  // namespace torpor::remote
