package deploy

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/leftout"
	"github.com/nametap/nametap/internal/testkit/netns"
)

// services are the services of the package.
var services = []string{"nametap.service", "nametap-rules.service", "nametap-resolved@.service"}

// TestInstall runs `make install` with each PREFIX. systemd accepts the installed units without a warning, and rates
// their exposure OK (below 3 of 10), also with legacy.conf. An existing file with settings is unchanged. It needs no Go
// if nothing has changed, and builds again if a source has.
func TestInstall(t *testing.T) { // V10
	t.Parallel()
	netns.Need(t, "make", "install", "systemd-analyze")
	tree := t.TempDir()
	for _, name := range []string{"Makefile", "release.mk", "go.mod", "go.sum", "tools", "deploy", "agent", "api", "cmd", "discovery", "dnsproxy", "egress", "examples", "inject", "internal", "iptables", "nds"} {
		output(t, command(t, nil, "cp", "-r", name, tree))
	}
	run := func(args ...string) string {
		t.Helper()
		return output(t, command(t, nil, "make", append([]string{"-C", tree, "GO=false"}, args...)...))
	}
	for _, built := range []string{"nametap", "share/nametap/man/man1/nametap.1", "share/nametap/bash-completion/completions/nametap", "share/nametap/zsh/site-functions/_nametap", "share/nametap/fish/vendor_completions.d/nametap.fish"} {
		write(t, filepath.Join(tree, "bin", built), built)
	}
	for prefix, lib := range map[string]string{"/usr/local": "/usr/local/lib", "/usr": "/usr/lib", "/opt/nametap": "/usr/local/lib"} {
		root := t.TempDir()
		write(t, filepath.Join(root, "etc/default/nametap"), "POD_NAMESPACE=shop\n")
		if text := run("install", "PREFIX="+prefix, "DESTDIR="+root); !strings.Contains(text, "systemctl enable --now nametap.socket nametap.service") {
			t.Errorf("make install does not print the next steps:\n%s", text)
		}
		if got := read(t, filepath.Join(root, "etc/default/nametap")); got != "POD_NAMESPACE=shop\n" {
			t.Errorf("the file with settings has %q", got)
		}
		for _, name := range services {
			unit := read(t, filepath.Join(root, lib, "systemd/system", name))
			if n, all := strings.Count(unit, prefix+"/bin/nametap "), strings.Count(unit, "/bin/nametap "); n != all || n == 0 {
				t.Errorf("%s/bin/nametap is run by %d of %d lines of the unit, want all:\n%s", prefix, n, all, unit)
			}
		}
		host := filepath.Join(root, "usr/lib/systemd/system") // the targets that the units refer to
		if err := os.CopyFS(host, os.DirFS("/usr/lib/systemd/system")); err != nil && !os.IsExist(err) {
			t.Logf("copying systemd's own units: %v", err)
		}
		write(t, filepath.Join(root, "bin/kill"), "")
		output(t, command(t, nil, "chmod", "755", filepath.Join(root, "bin/kill")))
		verify := append([]string{"--root=" + root, "--man=no", "verify", "nametap.socket", "nametap-resolved.socket"}, services...)
		if said := output(t, command(t, nil, "systemd-analyze", verify...)); said != "" {
			t.Errorf("PREFIX=%s: %s", prefix, said)
		}
		exposure := func(tenths string, units ...string) {
			t.Helper()
			output(t, command(t, nil, "systemd-analyze", append([]string{"--root=" + root, "security", "--offline=true", "--threshold=" + tenths}, units...)...))
		}
		// nametap.service has neither PrivateTmp= nor PrivateDevices=, which count 0.3 together: with them it would not
		// start on a full disk.
		exposure("19", "nametap.service")
		exposure("12", "nametap-resolved@.service")
		write(t, filepath.Join(root, "etc/systemd/system/nametap.service.d/legacy.conf"), read(t, "systemd/legacy.conf"))
		exposure("30", services...)
	}
	past := time.Now().Add(-24 * time.Hour)
	if err := os.Chtimes(filepath.Join(tree, "bin/nametap"), past, past); err != nil {
		t.Fatal(err)
	}
	if text := run("-n", "install"); !strings.Contains(text, " build -trimpath") {
		t.Errorf("an older binary is installed:\n%s", text)
	}
}

// TestTakenNumbers checks that the user and the group nametap get other numbers where others have 1337, and
// that the group of the user is its own; otherwise both have that number, which passes through the rules. P14.
func TestTakenNumbers(t *testing.T) {
	t.Parallel()
	netns.Need(t, "systemd-sysusers")
	if os.Getuid() != 0 {
		leftout.Test(t, "users below a directory need root")
	}
	const passwd, group = "root:x:0:0:root:/root:/bin/sh\n", "root:x:0:\n"
	for name, c := range map[string]struct {
		passwd, group string
		uid, gid      bool // whether nametap has 1337
	}{
		"nobody":             {passwd, group, true, true},
		"a user":             {passwd + "app:x:1337:1000::/:/bin/sh\n", group + "app:x:1000:\n", false, true},
		"a group":            {passwd, group + "app:x:1337:\n", true, false},
		"a user and a group": {passwd + "app:x:1337:1337::/:/bin/sh\n", group + "app:x:1337:\n", false, false},
	} {
		root := t.TempDir()
		write(t, filepath.Join(root, "etc/passwd"), c.passwd)
		write(t, filepath.Join(root, "etc/group"), c.group)
		write(t, filepath.Join(root, "usr/lib/sysusers.d/nametap.conf"), read(t, "systemd/nametap.sysusers"))
		output(t, command(t, nil, "systemd-sysusers", "--root="+root, "nametap.conf"))
		user := regexp.MustCompile(`(?m)^nametap:x:(\d+):(\d+):`).FindStringSubmatch(read(t, filepath.Join(root, "etc/passwd")))
		own := regexp.MustCompile(`(?m)^nametap:x:(\d+):`).FindStringSubmatch(read(t, filepath.Join(root, "etc/group")))
		if user == nil || own == nil || user[2] != own[1] || (user[1] == "1337") != c.uid || (own[1] == "1337") != c.gid {
			t.Errorf("%s has 1337: the user is %q and the group %q", name, user, own)
		}
	}
}

// TestMaintainerScripts checks that the shell accepts the scripts of the packages, and that an
// upgrade by dpkg or rpm removes nothing. P3.
func TestMaintainerScripts(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{"preinstall", "postinstall", "preremove", "postremove"} {
		text := output(t, command(t, nil, "tools/maintainer-script", name))
		if !strings.HasPrefix(text, "#!/bin/sh\n") || !strings.Contains(text, "\nbooted() {") || strings.Contains(text, "# functions") {
			t.Errorf("%s lacks the functions:\n%s", name, text)
		}
		write(t, filepath.Join(dir, name), text)
		output(t, command(t, nil, "sh", "-n", filepath.Join(dir, name)))
	}
	for _, args := range []string{"upgrade 9.9.9", "failed-upgrade 9.9.9", "1"} {
		// No program is in the PATH, so any command fails.
		cmd := command(t, nil, "/bin/sh", append([]string{filepath.Join(dir, "preremove")}, strings.Fields(args)...)...)
		cmd.Env = []string{"PATH=/nonexistent"}
		if said := output(t, cmd); said != "" {
			t.Errorf("preremove %s: %s", args, said)
		}
	}
}
