// SPDX-License-Identifier: Apache-2.0
// RespSettings: where a server of KV blocks is and who asks it.
//   redis://HOST[:PORT][,HOST[:PORT]…][/NAME]     rediss://… over TLS
// Several hosts are nodes of one cluster, of which one is enough to find the others. NAME begins every key: engines
// with another one never meet. Secrets are in files, never in the URL.
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
  std::string user;  // empty: the default one
  std::string password;
};

// `credentials`: a file of one line, PASSWORD or USER PASSWORD, which its owner alone may read; empty: none.
// kInvalidArgument names what is wrong, and no secret.
Result<RespSettings> resp_settings(const std::string& url, const std::string& credentials);

}  // namespace torpor::remote
