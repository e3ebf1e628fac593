#!/bin/sh
# Nsight Systems 2022.4 from Debian's component non-free, unpacked into a directory and not installed: the machine's own
# package lists stay as they are. Usage: install.sh DIRECTORY PYTHON. Says why and exits with 1 where it cannot be had.
set -eu
to=$(realpath -m "$1") python=$2
no() { echo "no nsys: $1" >&2; exit 1; }
[ "$(uname -m)" = x86_64 ] || no "the package is for x86_64, this is $(uname -m)"
for tool in apt-get dpkg; do command -v $tool > /dev/null || no "there is no $tool here"; done
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r $keys ] || no "$keys is missing"

mkdir -p "$to/apt/lists/partial" "$to/apt/cache/archives/partial" "$to/deb"
echo "deb [signed-by=$keys] http://deb.debian.org/debian bookworm main non-free" > "$to/apt/sources.list"
cat > "$to/apt/apt.conf" << END
Dir::Etc::sourcelist "$to/apt/sources.list";
Dir::Etc::sourceparts "-";
Dir::State::lists "$to/apt/lists";
Dir::Cache "$to/apt/cache";
APT::Architecture "amd64";
APT::Sandbox::User "root";
END
export APT_CONFIG="$to/apt/apt.conf"
apt-get -q update > "$to/apt/log" 2>&1 || no "Debian's package lists cannot be had (see $to/apt/log)"
# Of the last three, main has what the first two need and most images lack.
(cd "$to/deb" && apt-get -q download nsight-systems nsight-systems-target libssh-4 libpfm4 libgssapi-krb5-2) \
    >> "$to/apt/log" 2>&1 || no "the component non-free cannot be had (see $to/apt/log)"
rm -rf "$to/root"
for package in "$to"/deb/*.deb; do dpkg -x "$package" "$to/root"; done
libraries=$to/root/usr/lib/x86_64-linux-gnu
# The importer is looked for beside the directory of nsys itself.
ln -sfn ../../nsight-systems/host-linux-x64 "$libraries/nsight-systems/host-linux-x64"
# The nvtx package from 0.2.12 on does not recognise this version.
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target "$to/site" 'nvtx<0.2.12' \
    || no "nvtx before 0.2.12 cannot be had"
mkdir -p "$to/bin"
cat > "$to/bin/nsys" << END
#!/bin/sh
LD_LIBRARY_PATH=$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH} exec $libraries/nsight-systems/target-linux-x64/nsys "\$@"
END
chmod +x "$to/bin/nsys"
rm -rf "$to/apt" "$to/deb"
"$to/bin/nsys" --version
