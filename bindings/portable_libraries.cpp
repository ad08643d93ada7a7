// SPDX-License-Identifier: Apache-2.0
// For the portable module and inspector (cmake/TorporPortable.cmake): fmt and spdlog. Debian has them as shared
// libraries only. Their header-only form has the same functions; -fkeep-inline-functions compiles all of them.
#undef FMT_SHARED
#undef SPDLOG_COMPILED_LIB
#undef SPDLOG_SHARED_LIB
#define FMT_HEADER_ONLY
#define SPDLOG_HEADER_ONLY
#include <fmt/format.h>
#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

template class spdlog::sinks::stderr_sink<spdlog::details::console_mutex>;
template std::locale fmt::detail::locale_ref::get<std::locale>() const;
