#!/usr/bin/env bash
# Make the files of a whole trial federation: certificates, keys, allow-list, one folder per role.
#   deploy/scripts/new-federation.sh FOLDER [HOST] [SITES]
# In a real federation each site runs `fedlora keys new` itself and sends its .pub file only.
set -euo pipefail
umask 077
folder=${1:?usage: new-federation.sh FOLDER [HOST] [SITES]}
host=${2:-server}
sites=${3:-3}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
fedlora=${FEDLORA:-fedlora}

if [ -e "$folder" ]; then
  echo "$folder exists already; give a new folder" >&2
  exit 70
fi
sample=$(mktemp -d)
trap 'rm -rf "$sample"' EXIT
$fedlora init "$sample/p" >/dev/null
mkdir -p "$folder/server"
mkdir -m 0755 "$folder/models"   # base models in the layout of HF_HOME; nothing is downloaded at run time
$fedlora certs init "$folder/server/certs" --host "$host" --host localhost
mv "$folder/server/certs/ca.key" "$folder/ca.key"   # keep it offline: it is needed for renewals only
cp "$here/../examples/server/run.yaml" "$folder/server/run.yaml"
cp "$sample/p/data/public.jsonl" "$folder/server/public.jsonl"
for number in $(seq 1 "$sites"); do
  site="$folder/site-$number"
  mkdir -p "$site/trainer" "$site/client" "$site/data"
  $fedlora keys new "$site/new" "site-$number"
  mv "$site/new/site-$number" "$site/client/site.key"
  mv "$site/new/identity.pem" "$site/new/identity.pem.pub" "$site/trainer/"
  cp "$folder/server/certs/ca.crt" "$site/client/ca.crt"
  $fedlora keys allow "$folder/server/allow.json" "site-$number" "$site/new/site-$number.pub"
  rm -r "$site/new"
  sed -e "s/name: site-1 /name: site-$number /" -e "s#/keys/identity.pem#/config/identity.pem#" \
      -e "s#/keys/ledger.secret#/ledger/ledger.secret#" -e "s#0.0.0.0:9464#127.0.0.1:9464#" \
      "$here/../examples/site/site.yaml" > "$site/trainer/site.yaml"
  cp "$sample/p/data/site-$(( (number - 1) % 3 + 1 )).jsonl" "$site/data/records.jsonl"
done
if [ "$(id -u)" = 0 ]; then   # the users inside the images
  chown -R 10001:10001 "$folder/server"
  for number in $(seq 1 "$sites"); do
    chown -R 10002:10002 "$folder/site-$number/trainer" "$folder/site-$number/data"
    chown -R 10003:10003 "$folder/site-$number/client"
  done
else
  echo "not root: give server/ to uid 10001, trainer/ and data/ to 10002, client/ to 10003 for containers" >&2
fi
echo "made $folder; keep $folder/ca.key offline"
