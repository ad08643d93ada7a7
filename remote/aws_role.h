// SPDX-License-Identifier: Apache-2.0
// AwsRole: S3 credentials that a service of the cloud hands out to a machine, container or pod for some hours. They are
// fetched when they are first wanted, and again five minutes before they end.
//
// Which service, by the variables that AWS's own tools read, in their order (after keys in the environment, and with
// the file of credentials between the first and the second: s3_settings.h):
//
//   AWS_WEB_IDENTITY_TOKEN_FILE, AWS_ROLE_ARN   STS (AssumeRoleWithWebIdentity), as for a service account of EKS.
//     AWS_ROLE_SESSION_NAME                     default "torpor"
//     AWS_ENDPOINT_URL_STS, AWS_ENDPOINT_URL    default https://sts.REGION.amazonaws.com
//   AWS_CONTAINER_CREDENTIALS_FULL_URI, or      the agent of ECS or EKS Pod Identity
//   AWS_CONTAINER_CREDENTIALS_RELATIVE_URI      below http://169.254.170.2
//     AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE, AWS_CONTAINER_AUTHORIZATION_TOKEN
//   neither                                     the instance metadata of EC2, version 2
//     AWS_EC2_METADATA_SERVICE_ENDPOINT         default http://169.254.169.254
//     AWS_EC2_METADATA_DISABLED                 "true", in any case: it is not asked
//
// Protocols: the API reference of STS, "Container credential provider" of the AWS SDKs reference, and "Use IMDSv2" of
// the EC2 user guide. Libraries: libcurl, nlohmann/json, pugixml. AWS's SDK for C++ would do this, too, but Debian has
// no package of it.
//
// Threads: any; while one fetches, the others take what is still valid, or wait for it as long as they may. Errors:
// kUnauthenticated if the service refuses or answers something else, kUnavailable if it does not answer; never with a
// secret, a path or a query in them.
#pragma once

#include <ctime>
#include <memory>
#include <string>

#include "base/status.h"
#include "remote/environment.h"
#include "remote/s3_signature.h"

namespace torpor::remote {

class AwsRole {
 public:
  virtual ~AwsRole() = default;
  // The credentials at `now`, within about so many seconds. Where new ones cannot be had, the last ones as long as they
  // are valid; then nobody asks again for a minute.
  virtual Result<S3Credentials> credentials(std::time_t now, double seconds = 30) = 0;
};

// Null where the variables name no such role. kInvalidArgument: they contradict each other, an address has a user or a
// password in it, or a token would go by plain HTTP to a host that is neither this one nor one of AWS's for that.
Result<std::shared_ptr<AwsRole>> web_identity(const Environment& variable, const std::string& region,
                                              const std::string& ca_file);
Result<std::shared_ptr<AwsRole>> container_role(const Environment& variable, const std::string& ca_file);
Result<std::shared_ptr<AwsRole>> instance_role(const Environment& variable);

}  // namespace torpor::remote
