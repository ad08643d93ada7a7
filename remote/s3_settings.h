// SPDX-License-Identifier: Apache-2.0
// S3Settings: the address of an S3 bucket, and the credentials for it: from the URL, and from the environment variables
// and the file that AWS's own tools read, so that their settings work here too.
//
//   s3://BUCKET/PREFIX
//   AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL   another server than AWS, as http://127.0.0.1:8333
//   AWS_REGION, AWS_DEFAULT_REGION          default us-east-1
//   AWS_CA_BUNDLE                           certificates that are trusted in place of the system's
//   AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN; or else a web identity (aws_role.h); or else
//   AWS_SHARED_CREDENTIALS_FILE             default ~/.aws/credentials; only its owner may read it
//   AWS_PROFILE                             its section, default "default"
//   if neither is set and that file is absent: the role of the container, or of the machine
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "remote/aws_role.h"
#include "remote/environment.h"
#include "remote/s3_signature.h"

namespace torpor::remote {

struct S3Settings {
  std::string bucket;
  std::string prefix;    // "" or ends with '/'
  std::string endpoint;  // "https://host[:port]", without the bucket
  bool bucket_in_host = false;
  std::string region;
  std::string ca_file;  // empty: the system's
  S3Credentials credentials;
  std::shared_ptr<AwsRole> role{};  // used instead of `credentials`; or null
};

// Read the settings; makes no request. kInvalidArgument names the variable, file or part of the URL that is missing or
// wrong, without any secret.
Result<S3Settings> s3_settings(const std::string& url, const Environment& variable = environment);

}  // namespace torpor::remote
