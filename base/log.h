// Log lines over spdlog: one logger "torpor" on standard error, level from TORPOR_LOG (trace…off; default warn).
#pragma once

#include <memory>

#include <spdlog/logger.h>

namespace torpor {

spdlog::logger& log();

}  // namespace torpor
