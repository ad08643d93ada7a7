// SPDX-License-Identifier: Apache-2.0
// For the portable module and inspector (cmake/TorporPortable.cmake): calls libcurl and OpenSSL of the machine, and
// loads them when an object store or TLS is first used. So they get its security updates, and trust its authorities.
// Each function here has the name of a function of theirs and calls it. If the library is missing, it fails in a way
// that its caller expects; begin_curl() (remote/curl.cpp) and TlsTrust::of() (remote/byte_stream.cpp) then report it.
#include <dlfcn.h>

#include <cstdarg>
#include <initializer_list>

#include <curl/curl.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

namespace {

// Return the first of these libraries that exists, or null. It stays loaded. Its symbols are not visible to other
// libraries.
void* loaded(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (void* const library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL); library != nullptr) return library;
  }
  return nullptr;
}

void* of_curl(const char* name) {
  static void* const library = loaded({"libcurl.so.4", "libcurl-gnutls.so.4"});
  return library == nullptr ? nullptr : ::dlsym(library, name);
}

// Return a function of libssl. The loader finds symbols of libcrypto through it, too. Version 1.1 is not used: its
// support ended in 2023.
void* of_ssl(const char* name) {
  static void* const library = loaded({"libssl.so.3"});
  return library == nullptr ? nullptr : ::dlsym(library, name);
}

}  // namespace

// NOLINTBEGIN
#define FORWARD(find, result, name, parameters, arguments, absent)                 \
  result name parameters {                                                         \
    static const auto found = reinterpret_cast<result(*) parameters>(find(#name)); \
    return found == nullptr ? absent : found arguments;                            \
  }
#define CURL_(...) FORWARD(of_curl, __VA_ARGS__)
#define SSL_(...) FORWARD(of_ssl, __VA_ARGS__)
#define NOTHING static_cast<void>(0)

#undef curl_easy_setopt
#undef curl_easy_getinfo

extern "C" {

CURL_(CURLcode, curl_global_init, (long flags), (flags), CURLE_FAILED_INIT)
CURL_(CURL*, curl_easy_init, (), (), nullptr)
CURL_(void, curl_easy_cleanup, (CURL * curl), (curl), NOTHING)
CURL_(void, curl_easy_reset, (CURL * curl), (curl), NOTHING)
CURL_(CURLcode, curl_easy_perform, (CURL * curl), (curl), CURLE_FAILED_INIT)
CURL_(const char*, curl_easy_strerror, (CURLcode code), (code), "libcurl is not installed")
CURL_(curl_slist*, curl_slist_append, (curl_slist * list, const char* text), (list, text), nullptr)
CURL_(void, curl_slist_free_all, (curl_slist * list), (list), NOTHING)
CURL_(void, curl_free, (void* memory), (memory), NOTHING)
CURL_(CURLU*, curl_url, (), (), nullptr)
CURL_(void, curl_url_cleanup, (CURLU * url), (url), NOTHING)
#if LIBCURL_VERSION_NUM >= 0x080000
using UrlToRead = const CURLU*;
#else
using UrlToRead = CURLU*;
#endif
CURL_(CURLUcode, curl_url_get, (UrlToRead url, CURLUPart part, char** text, unsigned int flags),
      (url, part, text, flags), CURLUE_BAD_HANDLE)
CURL_(CURLUcode, curl_url_set, (CURLU * url, CURLUPart part, const char* text, unsigned int flags),
      (url, part, text, flags), CURLUE_BAD_HANDLE)

// Both functions take one more argument: a long, a pointer or a curl_off_t. On x86-64 each is one word, passed in the
// same way.
CURLcode curl_easy_setopt(CURL* curl, CURLoption option, ...) {
  static const auto found = reinterpret_cast<CURLcode (*)(CURL*, CURLoption, ...)>(of_curl("curl_easy_setopt"));
  if (found == nullptr) return CURLE_FAILED_INIT;
  va_list arguments;
  va_start(arguments, option);
  void* const argument = va_arg(arguments, void*);
  va_end(arguments);
  return found(curl, option, argument);
}
CURLcode curl_easy_getinfo(CURL* curl, CURLINFO info, ...) {
  static const auto found = reinterpret_cast<CURLcode (*)(CURL*, CURLINFO, ...)>(of_curl("curl_easy_getinfo"));
  if (found == nullptr) return CURLE_FAILED_INIT;
  va_list arguments;
  va_start(arguments, info);
  void* const argument = va_arg(arguments, void*);
  va_end(arguments);
  return found(curl, info, argument);
}

SSL_(const SSL_METHOD*, TLS_client_method, (), (), nullptr)
SSL_(SSL_CTX*, SSL_CTX_new, (const SSL_METHOD* method), (method), nullptr)
SSL_(void, SSL_CTX_free, (SSL_CTX * context), (context), NOTHING)
SSL_(long, SSL_CTX_ctrl, (SSL_CTX * context, int command, long number, void* pointer),
     (context, command, number, pointer), 0)
SSL_(void, SSL_CTX_set_verify, (SSL_CTX * context, int mode, SSL_verify_cb callback), (context, mode, callback),
     NOTHING)
SSL_(int, SSL_CTX_set_default_verify_paths, (SSL_CTX * context), (context), 0)
SSL_(int, SSL_CTX_load_verify_locations, (SSL_CTX * context, const char* file, const char* folder),
     (context, file, folder), 0)
SSL_(SSL*, SSL_new, (SSL_CTX * context), (context), nullptr)
SSL_(void, SSL_free, (SSL * ssl), (ssl), NOTHING)
SSL_(long, SSL_ctrl, (SSL * ssl, int command, long number, void* pointer), (ssl, command, number, pointer), 0)
SSL_(void, SSL_set_bio, (SSL * ssl, BIO* in, BIO* out), (ssl, in, out), NOTHING)
SSL_(int, SSL_set1_host, (SSL * ssl, const char* host), (ssl, host), 0)
SSL_(X509_VERIFY_PARAM*, SSL_get0_param, (SSL * ssl), (ssl), nullptr)
SSL_(void, SSL_set_connect_state, (SSL * ssl), (ssl), NOTHING)
SSL_(int, SSL_do_handshake, (SSL * ssl), (ssl), -1)
SSL_(int, SSL_get_error, (const SSL* ssl, int code), (ssl, code), SSL_ERROR_SSL)
SSL_(long, SSL_get_verify_result, (const SSL* ssl), (ssl), X509_V_ERR_UNSPECIFIED)
SSL_(int, SSL_read_ex, (SSL * ssl, void* bytes, size_t size, size_t* got), (ssl, bytes, size, got), 0)
SSL_(int, SSL_write_ex, (SSL * ssl, const void* bytes, size_t size, size_t* sent), (ssl, bytes, size, sent), 0)
SSL_(int, X509_VERIFY_PARAM_set1_ip_asc, (X509_VERIFY_PARAM * parameters, const char* address), (parameters, address),
     0)
SSL_(const char*, X509_verify_cert_error_string, (long code), (code), "")
SSL_(unsigned long, ERR_get_error, (), (), 0)
SSL_(void, ERR_clear_error, (), (), NOTHING)
SSL_(void, ERR_error_string_n, (unsigned long code, char* text, size_t size), (code, text, size), NOTHING)
SSL_(BIO*, BIO_new, (const BIO_METHOD* method), (method), nullptr)
SSL_(void, BIO_set_data, (BIO * bio, void* data), (bio, data), NOTHING)
SSL_(void*, BIO_get_data, (BIO * bio), (bio), nullptr)
SSL_(void, BIO_set_init, (BIO * bio, int set), (bio, set), NOTHING)
SSL_(void, BIO_set_flags, (BIO * bio, int flags), (bio, flags), NOTHING)
SSL_(void, BIO_clear_flags, (BIO * bio, int flags), (bio, flags), NOTHING)
SSL_(int, BIO_get_new_index, (), (), -1)
SSL_(BIO_METHOD*, BIO_meth_new, (int type, const char* name), (type, name), nullptr)
SSL_(int, BIO_meth_set_write, (BIO_METHOD * method, int (*write)(BIO*, const char*, int)), (method, write), 0)
SSL_(int, BIO_meth_set_read, (BIO_METHOD * method, int (*read)(BIO*, char*, int)), (method, read), 0)
SSL_(int, BIO_meth_set_ctrl, (BIO_METHOD * method, long (*ctrl)(BIO*, int, long, void*)), (method, ctrl), 0)
}
// NOLINTEND
