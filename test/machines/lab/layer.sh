# layer.sh ROOT DIR PACKAGE... installs packages in an overlay of ROOT and copies what
# differs from ROOT to DIR, which becomes a layer above ROOT. It runs in a mount namespace of
# its own. The overlay is in memory, because the upper directory of an overlay cannot be on an overlay.
root=$1 dir=$2
shift 2

tmp=$(mktemp -d)
mount -t tmpfs nt-vm-layer "$tmp"
trap 'cd /; umount -l "$tmp"; rmdir "$tmp"' EXIT
mkdir "$tmp/upper" "$tmp/work" "$tmp/root"
mount -t overlay nt-vm-layer -o "lowerdir=$root,upperdir=$tmp/upper,workdir=$tmp/work" "$tmp/root"
mount -t proc proc "$tmp/root/proc"

# For apt; a machine has its own. It is no mount, because packages may replace it by a link.
rm -f "$tmp/root/etc/resolv.conf"
cat /etc/resolv.conf >"$tmp/root/etc/resolv.conf"
# No program of a package may start here.
printf '#!/bin/sh\nexit 101\n' >"$tmp/root/usr/sbin/policy-rc.d"
chmod +x "$tmp/root/usr/sbin/policy-rc.d"

export DEBIAN_FRONTEND=noninteractive
chroot "$tmp/root" apt-get -qq update
chroot "$tmp/root" apt-get -qq install -y --no-install-recommends "$@"
chroot "$tmp/root" apt-get clean

rm "$tmp/root/usr/sbin/policy-rc.d"
umount "$tmp/root/proc" "$tmp/root"
cp -a "$tmp/upper/." "$dir/"
