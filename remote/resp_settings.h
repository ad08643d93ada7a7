// SPDX-License-Identifier: Apache-2.0
// RespSettings: the address of a server of KV blocks, and the user for it.
//   redis://HOST[:PORT][,HOST[:PORT]…][/NAME]     rediss://… over TLS
// Several hosts are nodes of one cluster; one of them is enough to find the others. NAME begins every key, so engines
// with another name share nothing. Secrets are read from files, never from the URL.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "remote/byte_stream.h"

namespace torpor::remote {

struct RespSettings {
  std::vector<Address> nodes;
  bool tls = false;
  std::string name;
  std::string user;  // empty: the default user
  std::string password;
};

// `credentials`: a file of one line, PASSWORD or USER PASSWORD, readable by its owner only; empty: none.
// kInvalidArgument names what is wrong, without any secret.
Result<RespSettings> resp_settings(const std::string& url, const std::string& credentials);

}  // namespace torpor::remote
