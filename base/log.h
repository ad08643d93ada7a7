// Log lines over spdlog: one logger "torpor" on standard error, level from TORPOR_LOG (trace…off; default warn).
// The bindings may replace the sink, e.g. by Python's logging.
#pragma once

#include <memory>

#include <spdlog/logger.h>

namespace torpor {

spdlog::logger& log();

}  // namespace torpor
