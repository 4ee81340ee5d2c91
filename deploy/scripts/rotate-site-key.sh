#!/usr/bin/env bash
# At the site: make a new deployment key. Ledger and identity key stay as they are.
#   deploy/scripts/rotate-site-key.sh KEYS_FOLDER SITE
# Then, at the server:  fedlora keys allow allow.json SITE SITE.pub --rotate
set -euo pipefail
umask 077
folder=${1:?usage: rotate-site-key.sh KEYS_FOLDER SITE}
site=${2:?usage: rotate-site-key.sh KEYS_FOLDER SITE}
${FEDLORA:-fedlora} keys rotate "$folder" "$site"
echo "send $folder/$site.pub to the server's operator, wait for the answer, then restart the client"
