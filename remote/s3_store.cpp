// SPDX-License-Identifier: Apache-2.0
#include "remote/s3_store.h"

#include <cstring>
#include <random>
#include <thread>

#include <fmt/core.h>
#include <pugixml.hpp>

#include "base/mutex.h"
#include "base/text.h"
#include "remote/curl.h"
#include "remote/object_keys.h"

namespace torpor::remote {
namespace {

constexpr size_t kMostAnswerBytes = 8 << 20;  // for a list or an error; a page of a list has 1,000 keys of 1,024 bytes

// One request and its answer. Only curl_easy_perform() runs its callbacks.
struct Exchange {
  CURL* handle = nullptr;
  std::span<const std::byte> body{};  // to send
  size_t sent = 0;
  std::span<std::byte> room{};  // where the content of a successful answer is written
  long success = 200;           // status of a successful answer: 206 for a part of an object
  uint64_t received = 0;        // bytes written to `room`
  bool too_large = false;
  bool is_whole = false;  // the answer is the whole object instead of a part
  std::string text{};     // body of any other answer
  const std::function<bool()>* stop = nullptr;
  bool stopped = false;
  long status = 0;

  static size_t read(char* to, size_t size, size_t count, void* self_pointer) {
    auto& self = *static_cast<Exchange*>(self_pointer);
    const size_t some = std::min(size * count, self.body.size() - self.sent);
    std::memcpy(to, self.body.data() + self.sent, some);
    self.sent += some;
    return some;
  }
  static int seek(void* self_pointer, curl_off_t offset, int origin) {
    auto& self = *static_cast<Exchange*>(self_pointer);
    if (origin != SEEK_SET || offset < 0 || static_cast<uint64_t>(offset) > self.body.size())
      return CURL_SEEKFUNC_CANTSEEK;
    self.sent = static_cast<size_t>(offset);
    return CURL_SEEKFUNC_OK;
  }
  static size_t write(char* from, size_t size, size_t count, void* self_pointer) {
    auto& self = *static_cast<Exchange*>(self_pointer);
    const size_t some = size * count;
    curl_easy_getinfo(self.handle, CURLINFO_RESPONSE_CODE, &self.status);
    if (self.status == 200 && self.success == 206) {
      self.is_whole = true;
      return 0;
    }
    if (self.status == self.success && self.room.data() != nullptr) {
      if (some > self.room.size() - self.received) {
        self.too_large = true;
        return 0;
      }
      std::memcpy(self.room.data() + self.received, from, some);
      self.received += some;
    } else {
      if (self.text.size() + some > kMostAnswerBytes) return 0;
      self.text.append(from, some);
    }
    return some;
  }
  static int progress(void* self_pointer, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
    auto& self = *static_cast<Exchange*>(self_pointer);
    self.stopped = self.stop != nullptr && *self.stop && (*self.stop)();
    return self.stopped ? 1 : 0;
  }
};

// Return the server's error text for people. It may be anything.
std::string explanation(const std::string& text) {
  pugi::xml_document document;
  if (!document.load_buffer(text.data(), text.size())) return {};
  const pugi::xml_node error = document.child("Error");
  const std::string words =
      fmt::format("{}: {}", error.child_value("Code"), error.child_value("Message")).substr(0, 300);
  return words == ": " ? "" : fmt::format(" ({})", harmless(words));
}

// Return whether an error of the server is this one.
bool is_error(const std::string& text, std::string_view code) {
  return text.find(fmt::format("<Code>{}</Code>", code)) != std::string::npos;
}

bool worth_another_try(CURLcode code, long status, const std::string& text) {
  if (code == CURLE_OK) {
    return status == 408 || status == 409 || status == 429 || status == 500 || (status >= 502 && status <= 504) ||
           (status == 400 && is_error(text, "RequestTimeout"));
  }
  return code == CURLE_COULDNT_CONNECT || code == CURLE_COULDNT_RESOLVE_HOST || code == CURLE_GOT_NOTHING ||
         code == CURLE_SEND_ERROR || code == CURLE_RECV_ERROR || code == CURLE_PARTIAL_FILE ||
         code == CURLE_OPERATION_TIMEDOUT || code == CURLE_HTTP2 || code == CURLE_HTTP2_STREAM;
}

class S3Store final : public ObjectStore {
 public:
  S3Store(std::string url, S3Settings settings, std::function<bool()> stop, S3Retries retries)
      : url_(std::move(url)), settings_(std::move(settings)), stop_(std::move(stop)), retries_(retries) {
    host_ = settings_.endpoint.substr(settings_.endpoint.find("://") + 3);
  }

  const std::string& url() const override { return url_; }

  Result<bool> put_new(std::string_view key, std::span<const std::byte> bytes) override {
    Call call{.method = "PUT", .key = key, .headers = {{"if-none-match", "*"}}, .body = bytes};
    TORPOR_ASSIGN_OR_RETURN(const Answer answer, send(call));
    if (answer.status == 412) return false;
    if (answer.status == 200 || answer.status == 201 || answer.status == 204) return true;
    return error_of(call, answer);
  }

  Result<uint64_t> get(std::string_view key, std::span<std::byte> room) override {
    Call call{.method = "GET", .key = key, .room = room};
    TORPOR_ASSIGN_OR_RETURN(const Answer answer, send(call));
    if (answer.status == 200) return answer.received;
    return error_of(call, answer);
  }

  Status get_range(std::string_view key, uint64_t offset, std::span<std::byte> room) override {
    Call call{.method = "GET",
              .key = key,
              .headers = {{"range", fmt::format("bytes={}-{}", offset, offset + room.size() - 1)}},
              .room = room,
              .success = 206};
    TORPOR_ASSIGN_OR_RETURN(const Answer answer, send(call));
    if (answer.status == 416 || (answer.status == 206 && answer.received < room.size()))
      return ends_too_early(*this, key, offset, room.size());
    if (answer.status == 200) return gives_no_parts();  // no byte was written
    return answer.status == 206 ? ok() : Status(error_of(call, answer));
  }

  Result<std::optional<uint64_t>> size(std::string_view key) override {
    Call call{.method = "HEAD", .key = key};
    TORPOR_ASSIGN_OR_RETURN(const Answer answer, send(call));
    if (answer.status == 200) return std::optional<uint64_t>(answer.length);
    if (answer.status == 404) return std::optional<uint64_t>();
    return error_of(call, answer);
  }

  Status remove(std::string_view key) override {
    Call call{.method = "DELETE", .key = key};
    TORPOR_ASSIGN_OR_RETURN(const Answer answer, send(call));
    if (answer.status == 200 || answer.status == 204 || answer.status == 404) return ok();
    return error_of(call, answer);
  }

  // List one key: the refusal of a request for the bucket itself has no reason. If the credentials may not list,
  // this returns ok, and the next call shows what is allowed.
  Status check_exists() override {
    Call call{.method = "GET", .query = {{"list-type", "2"}, {"max-keys", "1"}, {"prefix", settings_.prefix}}};
    TORPOR_ASSIGN_OR_RETURN(const Answer answer, send(call));
    return answer.status == 404 ? Status(error_of(call, answer)) : ok();
  }

  Status each_key(std::string_view prefix, const std::function<bool(std::string_view key)>& visit) override {
    std::string token;
    while (true) {
      Call call{.method = "GET", .query = {{"list-type", "2"}, {"prefix", settings_.prefix + std::string(prefix)}}};
      if (!token.empty()) call.query["continuation-token"] = token;
      TORPOR_ASSIGN_OR_RETURN(const Answer answer, send(call));
      if (answer.status != 200) return error_of(call, answer);
      TORPOR_ASSIGN_OR_RETURN(std::string next, read_page(answer.text, visit));
      if (next.empty()) return ok();
      if (next == token)
        return Error{.code = Code::kCorruption,
                     .what = fmt::format("{} answers one page of its list again and again", settings_.endpoint),
                     .next_step = "check that the endpoint speaks S3, version 2 of its lists"};
      token = std::move(next);
    }
  }

 private:
  struct Call {
    const char* method;
    std::string_view key{};
    std::map<std::string, std::string> query{};
    std::map<std::string, std::string> headers{};
    std::span<const std::byte> body{};
    std::span<std::byte> room{};
    long success = 200;
  };
  std::string words_for(const Call& call) const {
    return call.key.empty() ? fmt::format("listing {}", url_) : fmt::format("{} {} of {}", call.method, call.key, url_);
  }
  struct Answer {
    long status = 0;
    uint64_t received = 0;
    uint64_t length = 0;  // as the server said
    std::string text;
  };

  // Visit the keys of one page of a list. Return the token of the next page; "" after the last one, and if `visit`
  // returns false.
  Result<std::string> read_page(const std::string& text, const std::function<bool(std::string_view key)>& visit) const {
    pugi::xml_document document;
    const pugi::xml_node page =
        document.load_buffer(text.data(), text.size()) ? document.child("ListBucketResult") : pugi::xml_node();
    if (!page)
      return Error{.code = Code::kCorruption,
                   .what = fmt::format("{} answered a list with something else", settings_.endpoint),
                   .next_step = "check that the endpoint speaks S3"};
    for (const pugi::xml_node entry : page.children("Contents")) {
      const std::string_view key = entry.child_value("Key");
      if (!key.starts_with(settings_.prefix) || !is_key(key)) continue;
      if (!visit(key.substr(settings_.prefix.size()))) return std::string();
    }
    if (std::string_view(page.child_value("IsTruncated")) != "true") return std::string();
    std::string next = page.child_value("NextContinuationToken");
    if (next.empty())
      return Error{.code = Code::kCorruption,
                   .what = fmt::format("{} does not say where its list goes on", settings_.endpoint),
                   .next_step = "check that the endpoint speaks S3, version 2 of its lists"};
    return next;
  }

  Error gives_no_parts() const {
    return Error{.code = Code::kUnsupported,
                 .what = fmt::format("{} gives no part of an object", settings_.endpoint),
                 .next_step = "use an S3 server that knows the header Range"};
  }

  Error error_of(const Call& call, const Answer& answer) const {
    Error error{.code = Code::kUnavailable,
                .what = fmt::format("{} was answered {}{}", words_for(call), answer.status, explanation(answer.text)),
                .next_step = "try again"};
    if (is_error(answer.text, "RequestTimeout")) return error;
    if (is_error(answer.text, "ExpiredToken") || is_error(answer.text, "InvalidToken") ||
        is_error(answer.text, "TokenRefreshRequired")) {
      error.code = Code::kUnauthenticated;
      error.next_step = "get new credentials, AWS_SESSION_TOKEN among them, and check this machine's clock";
      return error;
    }
    switch (answer.status) {
      case 401:
      case 403:
        error.code = Code::kUnauthenticated;
        error.next_step = "check the credentials, what they allow, and this machine's clock";
        break;
      case 404:
        error.code =
            answer.text.find("NoSuchBucket") == std::string::npos ? Code::kNotFound : Code::kFailedPrecondition;
        error.next_step = error.code == Code::kNotFound ? "list what is there" : "make the bucket first";
        break;
      case 301:
      case 307:
      case 400:
        error.code = Code::kFailedPrecondition;
        error.next_step = "check AWS_REGION and AWS_ENDPOINT_URL";
        if (answer.text.empty())  // as that of a HEAD
          error.next_step += ", and whether the credentials have expired";
        break;
      case 413:
      case 507:
        error.code = Code::kResourceExhausted;
        error.next_step = "free space there";
        break;
      default: break;
    }
    return error;
  }

  Error error_of(const Call& call, CURLcode code, const Exchange& exchange, const char* words) const {
    const std::string what =
        fmt::format("{} failed: {}", words_for(call), *words != '\0' ? words : curl_easy_strerror(code));
    if (exchange.stopped)
      return Error{.code = Code::kAborted, .what = "stopped", .next_step = "start it again: it goes on where it was"};
    if (exchange.is_whole) return gives_no_parts();
    if (exchange.too_large)
      return Error{.code = Code::kCorruption,
                   .what = fmt::format("{} of {} is larger than {} bytes", call.key, url_, exchange.room.size()),
                   .next_step = "it is not what torpor stored there"};
    if (code == CURLE_PEER_FAILED_VERIFICATION || code == CURLE_SSL_CACERT_BADFILE || code == CURLE_SSL_CONNECT_ERROR)
      return Error{.code = Code::kUnauthenticated,
                   .what = what,
                   .next_step = "name the authority's certificate with AWS_CA_BUNDLE"};
    return Error{.code = Code::kUnavailable, .what = what, .next_step = "check AWS_ENDPOINT_URL, then try again"};
  }

  // Make a request with all retries. An answer is a value, whatever its status.
  Result<Answer> send(const Call& call) {
    TORPOR_ASSIGN_OR_RETURN(CurlHandle handle, take_handle());
    std::optional<Error> error;
    int attempt = 0;
    for (; attempt < retries_.attempts; ++attempt) {
      if (attempt > 0) TORPOR_RETURN_IF_ERROR(pause_before(attempt));
      if (is_over()) break;
      S3Credentials credentials = settings_.credentials;
      if (settings_.role != nullptr) {
        const double seconds = retries_.seconds_left ? retries_.seconds_left() : 30;
        TORPOR_ASSIGN_OR_RETURN(credentials, settings_.role->credentials(std::time(nullptr), seconds));
        if (is_over()) break;
      }
      std::array<char, CURL_ERROR_SIZE> words{};
      Exchange exchange{
          .handle = handle.get(), .body = call.body, .room = call.room, .success = call.success, .stop = &stop_};
      TORPOR_ASSIGN_OR_RETURN(const CURLcode code, perform(call, credentials, exchange, words.data()));
      Answer answer{.status = exchange.status, .received = exchange.received, .text = std::move(exchange.text)};
      if (!worth_another_try(code, answer.status, answer.text)) {
        if (code != CURLE_OK) return error_of(call, code, exchange, words.data());
        curl_off_t length = 0;
        curl_easy_getinfo(handle.get(), CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &length);
        answer.length = static_cast<uint64_t>(std::max<curl_off_t>(length, 0));
        give_handle(std::move(handle));
        return answer;
      }
      error = code == CURLE_OK ? error_of(call, answer) : error_of(call, code, exchange, words.data());
    }
    if (!error)
      return Error{.code = Code::kUnavailable,
                   .what = fmt::format("there was no time left for {}", words_for(call)),
                   .next_step = "try again"};
    return error->within(fmt::format("given up after {} attempts", attempt));
  }
  bool is_over() const { return retries_.seconds_left && retries_.seconds_left() <= 0; }

  Result<CURLcode> perform(const Call& call, const S3Credentials& credentials, Exchange& exchange, char* words) const {
    S3Request request{.method = call.method, .host = host_, .query = call.query, .headers = call.headers};
    request.path = settings_.bucket_in_host ? "/" : fmt::format("/{}{}", settings_.bucket, call.key.empty() ? "" : "/");
    if (!call.key.empty()) request.path += settings_.prefix + std::string(call.key);
    const std::string query = encoded_query(request);
    const std::string address = fmt::format("{}{}{}{}", settings_.endpoint, percent_encoded(request.path, true),
                                            query.empty() ? "" : "?", query);
    CurlLines lines;
    TORPOR_RETURN_IF_ERROR(append_line(lines, "Expect:"));
    for (const auto& [name, value] : signed_headers(request, credentials, settings_.region, std::time(nullptr))) {
      TORPOR_RETURN_IF_ERROR(append_line(lines, fmt::format("{}: {}", name, value)));
    }
    CURL* const handle = exchange.handle;
    curl_easy_reset(handle);  // keeps the connection
    set_up(handle, {.url = address, .lines = lines, .words = words, .write = &Exchange::write, .to = &exchange});
    curl_easy_setopt(handle, CURLOPT_CONNECTTIMEOUT, static_cast<long>(retries_.connect_seconds));
    if (retries_.seconds_left)  // 0 would mean: no limit
      curl_easy_setopt(handle, CURLOPT_TIMEOUT_MS, std::max(static_cast<long>(retries_.seconds_left() * 1000), 1L));
    curl_easy_setopt(handle, CURLOPT_LOW_SPEED_LIMIT, 1L);
    curl_easy_setopt(handle, CURLOPT_LOW_SPEED_TIME, static_cast<long>(retries_.stalled_seconds));
    if (!settings_.ca_file.empty()) curl_easy_setopt(handle, CURLOPT_CAINFO, settings_.ca_file.c_str());
    curl_easy_setopt(handle, CURLOPT_NOPROGRESS, 0L);
    curl_easy_setopt(handle, CURLOPT_XFERINFOFUNCTION, &Exchange::progress);
    curl_easy_setopt(handle, CURLOPT_XFERINFODATA, &exchange);
    const std::string_view method = call.method;
    if (method == "HEAD") curl_easy_setopt(handle, CURLOPT_NOBODY, 1L);
    if (method == "DELETE") curl_easy_setopt(handle, CURLOPT_CUSTOMREQUEST, "DELETE");
    if (method == "PUT") {
      curl_easy_setopt(handle, CURLOPT_UPLOAD, 1L);
      curl_easy_setopt(handle, CURLOPT_INFILESIZE_LARGE, static_cast<curl_off_t>(call.body.size()));
      curl_easy_setopt(handle, CURLOPT_READFUNCTION, &Exchange::read);
      curl_easy_setopt(handle, CURLOPT_READDATA, &exchange);
      curl_easy_setopt(handle, CURLOPT_SEEKFUNCTION, &Exchange::seek);
      curl_easy_setopt(handle, CURLOPT_SEEKDATA, &exchange);
    }
    const CURLcode code = curl_easy_perform(handle);
    curl_easy_getinfo(handle, CURLINFO_RESPONSE_CODE, &exchange.status);
    return code;
  }

  // Pause for a random part of a time that doubles, so that clients that were refused together do not return together.
  Status pause_before(int attempt) const {
    static thread_local std::minstd_rand random{std::random_device{}()};
    const double longest = std::min(retries_.first_pause_seconds * static_cast<double>(1 << (attempt - 1)), 5.0);
    double left = std::uniform_real_distribution<double>(0, longest)(random);
    while (true) {
      if (stop_ && stop_())
        return Error{.code = Code::kAborted, .what = "stopped", .next_step = "start it again: it goes on where it was"};
      if (left <= 0 || is_over()) return ok();
      std::this_thread::sleep_for(std::chrono::duration<double>(std::min(left, 0.1)));
      left -= 0.1;
    }
  }

  Result<CurlHandle> take_handle() {
    {
      const MutexLock lock(mutex_);
      if (!idle_.empty()) {
        CurlHandle handle = std::move(idle_.back());
        idle_.pop_back();
        return handle;
      }
    }
    return new_curl_handle();
  }
  void give_handle(CurlHandle handle) {
    const MutexLock lock(mutex_);
    idle_.push_back(std::move(handle));
  }

  const std::string url_;
  const S3Settings settings_;
  const std::function<bool()> stop_;
  const S3Retries retries_;
  std::string host_;
  Mutex mutex_;
  std::vector<CurlHandle> idle_ TORPOR_GUARDED_BY(mutex_);  // with open connections
};

}  // namespace

std::unique_ptr<ObjectStore> make_s3_store(std::string url, S3Settings settings, std::function<bool()> stop,
                                           S3Retries retries) {
  return std::make_unique<S3Store>(std::move(url), std::move(settings), std::move(stop), retries);
}

}  // namespace torpor::remote
