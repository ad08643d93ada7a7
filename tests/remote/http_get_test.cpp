// SPDX-License-Identifier: Apache-2.0
// A key goes to the server that is named, and to nobody else.
#include "remote/http_get.h"

#include <cstdlib>

#include <fmt/core.h>

#include "tests/remote/http_peer.h"
#include "tests/support/results.h"

namespace torpor::remote {
namespace {

using test::value_of;

constexpr const char* kProxies[] = {"http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"};

TEST(HttpGet, AsksTheServerItselfWhateverProxyTheEnvironmentNames) {
  HttpPeer proxy({answer(200, "of the proxy"), answer(200, "of the proxy")});
  HttpPeer server({answer(200, "of the server"), answer(200, "of the server")});
  for (const char* const name : kProxies) ::setenv(name, proxy.endpoint().c_str(), 1);
  EXPECT_EQ(value_of(http_get(server.endpoint() + "/v1/sessions", "secret", {})).body, "of the server");
  EXPECT_EQ(value_of(http_post(server.endpoint() + "/torpor/switch", "secret", {})).body, "of the server");
  for (const char* const name : kProxies) ::unsetenv(name);
  EXPECT_EQ(proxy.count(), 0u);
  ASSERT_EQ(server.count(), 2u);
  server.wait_for_all();
  for (const std::string& head : server.heads) EXPECT_NE(head.find("Authorization: Bearer secret"), std::string::npos);
}

TEST(HttpGet, FollowsNoRedirect) {
  HttpPeer other({answer(200)});
  HttpPeer server({fmt::format("HTTP/1.1 307 X\r\nLocation: {}/\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
                               other.endpoint())});
  EXPECT_EQ(value_of(http_post(server.endpoint(), "secret", {})).status, 307);
  EXPECT_EQ(other.count(), 0u);
}

}  // namespace
}  // namespace torpor::remote
