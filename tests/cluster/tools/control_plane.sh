#!/usr/bin/env bash
# A Kubernetes control plane of one's own: etcd, kube-apiserver, kube-controller-manager, kube-scheduler. Built once
# per machine into ${SYNCLINE_TOOLS:-~/.cache/syncline}/kube-1.20.2 and reused; prints that folder.
#
# No package index has these binaries, but Debian 12's source package `kubernetes` is the whole upstream tree (1.20.2)
# with everything it needs vendored, and Debian 12 has the Go that builds it. Neither root nor Docker is needed, nothing
# is installed, and a Debian 13 host works too, since the lists of bookworm are kept in a folder of their own.
# About 11 minutes of processor time, 2 GB of disk while it builds, 330 MB afterwards.
set -euo pipefail

tools=${SYNCLINE_TOOLS:-${HOME:-/root}/.cache/syncline}
out=$tools/kube-1.20.2
work=$tools/build-kube-1.20.2
mirror=${SYNCLINE_DEBIAN:-http://deb.debian.org/debian}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
binaries=(kube-apiserver kube-controller-manager kube-scheduler)

say() { echo "control plane: $*" >&2; }

whole() {
  local name
  for name in etcd "${binaries[@]}"; do [[ -x $out/$name ]] || return 1; done
}

mkdir -p "$tools"
exec 9>"$tools/kube-1.20.2.lock"
flock 9 # a second test run waits for the first one's build
if whole; then
  echo "$out"
  exit
fi

[[ $(uname -m) == x86_64 ]] || { say "is only known to build on x86_64"; exit 1; }
for needed in apt-get dpkg-deb dpkg-source make gcc; do
  command -v $needed >/dev/null || { say "needs $needed (Debian: dpkg-dev make gcc)"; exit 1; }
done

say "building Kubernetes 1.20.2 from Debian's source package (about 11 minutes of processor time)"
mkdir -p "$work"/{lists/partial,cache/archives/partial,sources,debs,source,root,home}

# ---- Debian 12's lists, apart from the host's own
cat >"$work/sources/bookworm.sources" <<SOURCES
Types: deb deb-src
URIs: $mirror
Suites: bookworm
Components: main
Signed-By: $keyring
SOURCES
cat >"$work/apt.conf" <<CONF
Dir::Etc::SourceList "/dev/null";
Dir::Etc::SourceParts "$work/sources";
Dir::State::Lists "$work/lists";
Dir::State::Status "/dev/null";
Dir::Cache "$work/cache";
Debug::NoLocking "true";
APT::Sandbox::User "";
CONF
export APT_CONFIG=$work/apt.conf
apt-get update -qq >&2

# ---- what builds it, unpacked and not installed. rsync and its libraries: the build copies generated files with it
(
  cd "$work/debs"
  apt-get download -qq golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev \
    rsync libpopt0 libxxhash0 etcd-server >&2
  for package in *.deb; do dpkg-deb -x "$package" "$work/root"; done
)
cd "$work/source"
apt-get source -qq --download-only kubernetes >&2
rm -rf tree
dpkg-source --no-check -x kubernetes_*.dsc tree >/dev/null
cd tree

# ---- one library is exchanged. The vendored reflect2 (1.0.1) walks maps by way of the runtime's private iterator, whose
# layout Go 1.18 changed: the server ends with a segmentation fault at the first custom resource that it stores.
# Debian packages 1.0.2, which knows the new layout, with the same interface.
reflect2=vendor/github.com/modern-go/reflect2
find $reflect2 -maxdepth 1 -type f \( -name '*.go' -o -name '*.s' \) -delete
find "$work/root/usr/share/gocode/src/github.com/modern-go/reflect2" -maxdepth 1 -type f \
  \( -name '*.go' -o -name '*.s' \) ! -name '*_test.go' -exec cp {} $reflect2/ \;

# ---- static binaries, without a network
mkdir -p .go/src/k8s.io
ln -sfn ../../.. .go/src/k8s.io/kubernetes
export HOME=$work/home GOPATH=$PWD/.go GOROOT=$work/root/usr/lib/go-1.19 GOPROXY=off GOFLAGS='' CGO_ENABLED=0
export PATH=$GOROOT/bin:$work/root/usr/bin:$PATH
LD_LIBRARY_PATH=$work/root/usr/lib/$(gcc -print-multiarch)
export LD_LIBRARY_PATH
nice make WHAT="${binaries[*]/#/cmd/}" KUBE_GIT_VERSION=v1.20.2 KUBE_GIT_MAJOR=1 KUBE_GIT_MINOR=20 \
  KUBE_GIT_TREE_STATE=archive KUBE_GIT_COMMIT=debian >&2

mkdir -p "$out.new"
cp "${binaries[@]/#/_output/local/bin/linux/amd64/}" "$work/root/usr/bin/etcd" "$out.new/"
rm -rf "$out"
mv "$out.new" "$out"
cd "$tools"
chmod -R u+w "$work"
rm -rf "$work"
whole
echo "$out"
