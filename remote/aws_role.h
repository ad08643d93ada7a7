// SPDX-License-Identifier: Apache-2.0
// AwsRole: temporary S3 credentials from a service of the cloud for a machine, container or pod. They are fetched at
// first use, and again five minutes before they expire.
//
// These variables of AWS's own tools choose the service, in this order. (Keys in the environment come before all of
// them; the file of credentials comes between the first and the second: s3_settings.h.)
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
// the EC2 user guide. Libraries: libcurl, nlohmann/json, pugixml. AWS's SDK for C++ would do this too, but Debian has
// no package of it.
//
// Threads: any. While one thread fetches, others use credentials that are still valid, or wait up to their own limit.
// Errors: kUnauthenticated: the service refuses, or answers something else. kUnavailable: it does not answer. Errors
// never contain a secret, a path or a query.
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
  // Return credentials that are valid at `now`, within about `seconds`. If a fetch fails, return the last ones while
  // they are valid, and fetch again after a minute at the earliest.
  virtual Result<S3Credentials> credentials(std::time_t now, double seconds = 30) = 0;
};

// Return the role that the variables name; null if they name none. kInvalidArgument: they contradict each other, an
// address contains a user or a password, or a token would be sent by plain HTTP to another host than this machine or
// AWS's own agents.
Result<std::shared_ptr<AwsRole>> web_identity(const Environment& variable, const std::string& region,
                                              const std::string& ca_file);
Result<std::shared_ptr<AwsRole>> container_role(const Environment& variable, const std::string& ca_file);
Result<std::shared_ptr<AwsRole>> instance_role(const Environment& variable);

}  // namespace torpor::remote
