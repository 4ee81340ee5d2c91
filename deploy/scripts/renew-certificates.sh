#!/usr/bin/env bash
# At the server: issue a new server certificate (and, with --new-ca, a new authority with an overlap).
#   deploy/scripts/renew-certificates.sh CERTS_FOLDER CA_KEY [--new-ca]
# The authority's key is brought in for the renewal and taken out again.
set -euo pipefail
umask 077
folder=${1:?usage: renew-certificates.sh CERTS_FOLDER CA_KEY [--new-ca]}
ca_key=${2:?usage: renew-certificates.sh CERTS_FOLDER CA_KEY [--new-ca]}
shift 2
cp "$ca_key" "$folder/ca.key"
trap 'rm -f "$folder/ca.key"' EXIT
${FEDLORA:-fedlora} certs renew "$folder" "$@"
if ! { cp "$folder/ca.key" "$ca_key.new" && mv "$ca_key.new" "$ca_key"; }; then
  trap - EXIT   # with --new-ca it is the only copy of the new authority's key
  echo "$ca_key cannot be written; take $folder/ca.key away by hand" >&2
  exit 70
fi
echo "restart the server; after --new-ca send $folder/ca.crt to every site first"
