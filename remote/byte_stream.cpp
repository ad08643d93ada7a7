// SPDX-License-Identifier: Apache-2.0
#include "remote/byte_stream.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fmt/core.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

namespace torpor::remote {
namespace {

constexpr size_t kPieces = 64;  // in one writev()

Error unavailable(std::string_view what, const char* why) {
  return {.code = Code::kUnavailable, .what = fmt::format("{}: {}", what, why), .next_step = "try again"};
}

Status wait_for(int socket, short event, Deadline until) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now()).count();
    pollfd polled{.fd = socket, .events = event, .revents = 0};
    const int ready = left <= 0 ? 0 : ::poll(&polled, 1, static_cast<int>(std::min<int64_t>(left, 1 << 30)));
    if (ready > 0) return ok();
    if (ready < 0 && errno == EINTR) continue;
    if (ready < 0) return unavailable("poll", std::strerror(errno));
    return Error{.code = Code::kTimeout, .what = "there was no answer in time", .next_step = "try again"};
  }
}

class Socket {
 public:
  explicit Socket(int number) : number_(number) {}
  ~Socket() {
    if (number_ >= 0) ::close(number_);
  }
  Socket(Socket&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  int number() const { return number_; }

 private:
  int number_;
};

Result<Socket> connected(const addrinfo& to, Deadline until) {
  Socket made(::socket(to.ai_family, to.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, to.ai_protocol));
  if (made.number() < 0) return unavailable("socket", std::strerror(errno));
  const int on = 1;
  ::setsockopt(made.number(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(made.number(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  if (::connect(made.number(), to.ai_addr, to.ai_addrlen) == 0) return made;
  if (errno != EINPROGRESS) return unavailable("connect", std::strerror(errno));
  TORPOR_RETURN_IF_ERROR(wait_for(made.number(), POLLOUT, until));
  int failed = 0;
  socklen_t size = sizeof failed;
  ::getsockopt(made.number(), SOL_SOCKET, SO_ERROR, &failed, &size);
  if (failed != 0) return unavailable("connect", std::strerror(failed));
  return made;
}

Result<Socket> connected(const Address& address, Deadline until) {
  const addrinfo wanted{.ai_flags = AI_NUMERICSERV, .ai_socktype = SOCK_STREAM};
  addrinfo* found = nullptr;
  const int failed = ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &wanted, &found);
  if (failed != 0) return unavailable("its name", ::gai_strerror(failed));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> all(found, &::freeaddrinfo);
  Result<Socket> last = unavailable("its name", "no address");
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    last = connected(*each, until);
    if (last || last.error().code == Code::kTimeout) break;
  }
  return last;
}

class PlainStream final : public ByteStream {
 public:
  explicit PlainStream(Socket socket) : socket_(std::move(socket)) {}

  Result<size_t> read_some(std::span<std::byte> room, Deadline until) override {
    while (true) {
      const ssize_t got = ::recv(socket_.number(), room.data(), room.size(), 0);
      if (got > 0) return static_cast<size_t>(got);
      if (got == 0) return unavailable("the connection", "it was ended by the other side");
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        TORPOR_RETURN_IF_ERROR(wait_for(socket_.number(), POLLIN, until));
      } else if (errno != EINTR) {
        return unavailable("the connection", std::strerror(errno));
      }
    }
  }

  Status write_all(std::span<const std::span<const std::byte>> pieces, Deadline until) override {
    size_t piece = 0;
    size_t in_piece = 0;
    while (piece < pieces.size()) {
      std::array<iovec, kPieces> list;
      size_t size = 0;
      for (size_t at = piece; at < pieces.size() && size < list.size(); ++at) {
        const auto rest = pieces[at].subspan(at == piece ? in_piece : 0);
        list[size++] = {const_cast<std::byte*>(rest.data()), rest.size()};
      }
      msghdr message{};
      message.msg_iov = list.data();
      message.msg_iovlen = size;
      ssize_t sent = ::sendmsg(socket_.number(), &message, MSG_NOSIGNAL);
      if (sent < 0) {
        if (errno == EINTR) continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK) return unavailable("the connection", std::strerror(errno));
        TORPOR_RETURN_IF_ERROR(wait_for(socket_.number(), POLLOUT, until));
        continue;
      }
      for (auto left = static_cast<size_t>(sent); piece < pieces.size();) {
        const size_t of_piece = pieces[piece].size() - in_piece;
        if (left < of_piece) {
          in_piece += left;
          break;
        }
        left -= of_piece;
        in_piece = 0;
        ++piece;
      }
    }
    return ok();
  }

 private:
  const Socket socket_;
};

// ---- TLS

struct SslDeleter {
  void operator()(SSL* ssl) const { SSL_free(ssl); }
};

std::string tls_words() {
  const unsigned long code = ERR_get_error();
  ERR_clear_error();
  std::array<char, 256> words{};
  ERR_error_string_n(code, words.data(), words.size());
  return code == 0 ? "the connection ended" : words.data();
}

int number_of(BIO* bio) { return static_cast<int>(reinterpret_cast<intptr_t>(BIO_get_data(bio))); }

// A socket BIO without SIGPIPE: OpenSSL's own raises that signal if the peer has closed the connection.
const BIO_METHOD* quiet_socket() {
  static const BIO_METHOD* const method = [] {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "torpor socket");
    BIO_meth_set_write(made, [](BIO* bio, const char* bytes, int size) {
      BIO_clear_retry_flags(bio);
      const ssize_t sent = ::send(number_of(bio), bytes, static_cast<size_t>(size), MSG_NOSIGNAL);
      if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) BIO_set_retry_write(bio);
      return static_cast<int>(sent);
    });
    BIO_meth_set_read(made, [](BIO* bio, char* room, int size) {
      BIO_clear_retry_flags(bio);
      const ssize_t got = ::recv(number_of(bio), room, static_cast<size_t>(size), 0);
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) BIO_set_retry_read(bio);
      return static_cast<int>(got);
    });
    BIO_meth_set_ctrl(made, [](BIO*, int command, long, void*) -> long { return command == BIO_CTRL_FLUSH ? 1 : 0; });
    return made;
  }();
  return method;
}

class TlsStream final : public ByteStream {
 public:
  TlsStream(Socket socket, std::unique_ptr<SSL, SslDeleter> ssl) : socket_(std::move(socket)), ssl_(std::move(ssl)) {}

  static Result<std::unique_ptr<ByteStream>> open(Socket socket, const Address& address, const TlsTrust& trust,
                                                  Deadline until) {
    std::unique_ptr<SSL, SslDeleter> ssl(SSL_new(trust.context()));
    BIO* const bio = ssl == nullptr ? nullptr : BIO_new(quiet_socket());
    if (bio == nullptr)
      return Error{.code = Code::kResourceExhausted, .what = "no memory for TLS", .next_step = "free some"};
    BIO_set_data(bio, reinterpret_cast<void*>(static_cast<intptr_t>(socket.number())));
    BIO_set_init(bio, 1);
    SSL_set_bio(ssl.get(), bio, bio);
    in6_addr unused{};
    const char* const host = address.host.c_str();
    if (::inet_pton(AF_INET, host, &unused) == 1 || ::inet_pton(AF_INET6, host, &unused) == 1) {
      X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl.get()), host);
    } else {
      SSL_set1_host(ssl.get(), host);
      SSL_set_tlsext_host_name(ssl.get(), host);
    }
    SSL_set_connect_state(ssl.get());
    auto made = std::make_unique<TlsStream>(std::move(socket), std::move(ssl));
    const Status shaken = made->repeat(until, [](SSL* of) { return SSL_do_handshake(of); });
    if (!shaken) {
      const long verified = SSL_get_verify_result(made->ssl_.get());
      if (verified == X509_V_OK) return shaken.error();
      return Error{.code = Code::kUnauthenticated,
                   .what = fmt::format("its certificate is not trusted: {}", X509_verify_cert_error_string(verified)),
                   .next_step = "name the authority's certificate"};
    }
    return std::unique_ptr<ByteStream>(std::move(made));
  }

  Result<size_t> read_some(std::span<std::byte> room, Deadline until) override {
    size_t got = 0;
    TORPOR_RETURN_IF_ERROR(repeat(until, [&](SSL* ssl) { return SSL_read_ex(ssl, room.data(), room.size(), &got); }));
    return got;
  }

  Status write_all(std::span<const std::span<const std::byte>> pieces, Deadline until) override {
    for (std::span<const std::byte> piece : pieces) {
      while (!piece.empty()) {
        size_t sent = 0;
        TORPOR_RETURN_IF_ERROR(
            repeat(until, [&](SSL* ssl) { return SSL_write_ex(ssl, piece.data(), piece.size(), &sent); }));
        piece = piece.subspan(sent);
      }
    }
    return ok();
  }

 private:
  template <class Call>
  Status repeat(Deadline until, Call call) {
    while (true) {
      ERR_clear_error();
      const int done = call(ssl_.get());
      if (done > 0) return ok();
      const int why = SSL_get_error(ssl_.get(), done);
      if (why == SSL_ERROR_WANT_READ) {
        TORPOR_RETURN_IF_ERROR(wait_for(socket_.number(), POLLIN, until));
      } else if (why == SSL_ERROR_WANT_WRITE) {
        TORPOR_RETURN_IF_ERROR(wait_for(socket_.number(), POLLOUT, until));
      } else {
        return unavailable("TLS", tls_words().c_str());
      }
    }
  }

  const Socket socket_;
  const std::unique_ptr<SSL, SslDeleter> ssl_;
};

}  // namespace

std::string Address::text() const {
  return host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port) : fmt::format("[{}]:{}", host, port);
}

TlsTrust::~TlsTrust() { SSL_CTX_free(context_); }

Result<std::shared_ptr<const TlsTrust>> TlsTrust::of(const std::string& authorities) {
  const SSL_METHOD* const method = TLS_client_method();
  if (method == nullptr)  // in the portable module, which loads OpenSSL at run time
    return Error{.code = Code::kUnsupported,
                 .what = "TLS needs OpenSSL 3, and libssl.so.3 cannot be loaded",
                 .next_step = "install it: the package libssl3 (Debian, Ubuntu) or openssl-libs (Fedora, RHEL)"};
  SSL_CTX* const context = SSL_CTX_new(method);
  if (context == nullptr)
    return Error{.code = Code::kResourceExhausted, .what = "no memory for TLS", .next_step = "free some"};
  std::shared_ptr<const TlsTrust> made(new TlsTrust(context));
  SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  const int loaded = authorities.empty() ? SSL_CTX_set_default_verify_paths(context)
                                         : SSL_CTX_load_verify_locations(context, authorities.c_str(), nullptr);
  if (loaded == 1) return made;
  return Error{.code = Code::kInvalidArgument,
               .what = fmt::format("{} has no certificates: {}", authorities, tls_words()),
               .next_step = "name a file of certificates in PEM"};
}

Result<std::unique_ptr<ByteStream>> connect_to(const Address& address, const TlsTrust* trust, Deadline until) {
  Result<Socket> socket = connected(address, until);
  if (!socket) return socket.error().within(address.text());
  if (trust == nullptr) return std::unique_ptr<ByteStream>(std::make_unique<PlainStream>(std::move(*socket)));
  Result<std::unique_ptr<ByteStream>> made = TlsStream::open(std::move(*socket), address, *trust, until);
  if (!made) return made.error().within(address.text());
  return made;
}

}  // namespace torpor::remote
