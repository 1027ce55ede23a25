package deploy

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/netns"
)

// services are the services of the package.
var services = []string{"nametap.service", "nametap-rules.service", "nametap-resolved@.service"}

// install runs `make install` into a new directory, which it returns. It may build in bin/, so parallel
// tests do not call it.
func install(t *testing.T, variables ...string) string {
	t.Helper()
	root := t.TempDir()
	reinstall(t, root, variables...)
	return root
}

func reinstall(t *testing.T, root string, variables ...string) {
	t.Helper()
	netns.Need(t, "make", "install")
	cmd := command(t, nil, "make", append([]string{"-C", "..", "install", "DESTDIR=" + root}, variables...)...)
	cmd.Env = os.Environ() // Go's caches
	if text := output(t, cmd); !strings.Contains(text, "systemctl enable --now nametap.socket nametap.service") {
		t.Errorf("make install does not print the next steps:\n%s", text)
	}
}

// TestUnits checks that systemd accepts the installed units without a warning.
func TestUnits(t *testing.T) {
	netns.Need(t, "systemd-analyze")
	for prefix, lib := range map[string]string{"/usr/local": "/usr/local/lib", "/usr": "/usr/lib", "/opt/nametap": "/usr/local/lib"} {
		root := install(t, "PREFIX="+prefix)
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
		if err := errors.Join(os.MkdirAll(filepath.Join(root, "bin"), 0o755), os.WriteFile(filepath.Join(root, "bin/kill"), nil, 0o755)); err != nil {
			t.Fatal(err)
		}
		verify := append([]string{"--root=" + root, "--man=no", "verify", "nametap.socket", "nametap-resolved.socket"}, services...)
		if said := output(t, command(t, nil, "systemd-analyze", verify...)); said != "" {
			t.Errorf("PREFIX=%s: %s", prefix, said)
		}
	}
}

// TestExposure checks that the exposure of the unit is below 3 of 10, which systemd rates
// OK, also with legacy.conf.
func TestExposure(t *testing.T) {
	netns.Need(t, "systemd-analyze")
	root := install(t)
	security := func() {
		t.Helper()
		output(t, command(t, nil, "systemd-analyze", "--root="+root, "security", "--offline=true", "--threshold=30",
			"nametap.service", "nametap-rules.service", "nametap-resolved@.service"))
	}
	security()
	dir := filepath.Join(root, "etc/systemd/system/nametap.service.d")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "legacy.conf"), []byte(read(t, "systemd/legacy.conf")), 0o644); err != nil {
		t.Fatal(err)
	}
	security()
}

// TestLeastExposure checks that each unit uses what systemd offers against exposure where it costs nothing, without
// legacy.conf. nametap.service has neither PrivateTmp= nor PrivateDevices=, which count 0.3 together: with them it
// would not start on a full disk (V10).
func TestLeastExposure(t *testing.T) {
	netns.Need(t, "systemd-analyze")
	root := install(t)
	for unit, tenths := range map[string]string{"nametap.service": "19", "nametap-resolved@.service": "12"} {
		output(t, command(t, nil, "systemd-analyze", "--root="+root, "security", "--offline=true", "--threshold="+tenths, unit))
	}
}

// TestUserAndLock checks that the user and the group have the number that passes through
// the rules, and that the lock exists.
func TestUserAndLock(t *testing.T) {
	netns.Need(t, "systemd-sysusers", "systemd-tmpfiles")
	if os.Getuid() != 0 {
		t.Skip("LEFT OUT: users and files below a directory need root")
	}
	root := install(t)
	output(t, command(t, nil, "systemd-sysusers", "--root="+root, "nametap.conf"))
	if passwd := read(t, filepath.Join(root, "etc/passwd")); !strings.Contains(passwd, "nametap:x:1337:1337:") {
		t.Errorf("no user nametap with 1337: %s", passwd)
	}
	if group := read(t, filepath.Join(root, "etc/group")); !strings.Contains(group, "nametap:x:1337:") {
		t.Errorf("no group nametap with 1337: %s", group)
	}
	output(t, command(t, nil, "systemd-tmpfiles", "--root="+root, "--create", "nametap.conf"))
	if info, err := os.Stat(filepath.Join(root, "run/xtables.lock")); err != nil || info.Mode() != 0o600 {
		t.Errorf("lock: %v, %v", info, err)
	}
}

// TestTakenNumbers checks that the user and the group nametap get other numbers where others have 1337, and
// that the group of the user is its own. P14.
func TestTakenNumbers(t *testing.T) {
	t.Parallel()
	netns.Need(t, "systemd-sysusers")
	if os.Getuid() != 0 {
		t.Skip("LEFT OUT: users below a directory need root")
	}
	const passwd, group = "root:x:0:0:root:/root:/bin/sh\n", "root:x:0:\n"
	for name, c := range map[string]struct {
		passwd, group string
		uid, gid      bool // whether nametap has 1337
	}{
		"a user":             {passwd + "app:x:1337:1000::/:/bin/sh\n", group + "app:x:1000:\n", false, true},
		"a group":            {passwd, group + "app:x:1337:\n", true, false},
		"a user and a group": {passwd + "app:x:1337:1337::/:/bin/sh\n", group + "app:x:1337:\n", false, false},
	} {
		root := t.TempDir()
		for _, dir := range []string{"etc", "usr/lib/sysusers.d"} {
			if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
				t.Fatal(err)
			}
		}
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

// TestInstallKeepsSettings checks that an existing file with settings is unchanged.
func TestInstallKeepsSettings(t *testing.T) {
	root := install(t)
	path := filepath.Join(root, "etc/default/nametap")
	if err := os.WriteFile(path, []byte("POD_NAMESPACE=shop\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	reinstall(t, root)
	if got := read(t, path); got != "POD_NAMESPACE=shop\n" {
		t.Errorf("the file has %q", got)
	}
}

// assignment matches a setting of the file, also in a comment.
var assignment = regexp.MustCompile(`(?m)^#?([A-Z_]+=.*)$`)

// TestDefaultFile checks that each setting exists and has a valid value.
func TestDefaultFile(t *testing.T) {
	t.Parallel()
	var all []string
	for _, match := range assignment.FindAllStringSubmatch(read(t, "systemd/nametap.default"), -1) {
		all = append(all, match[1])
	}
	if len(all) < 10 {
		t.Fatalf("the file has only the settings %q", all)
	}
	output(t, command(t, all, "nametap", "capture", "print", "--clean"))
	help := output(t, command(t, nil, "nametap", "agent", "--help"))
	for _, setting := range all {
		name, _, _ := strings.Cut(setting, "=")
		flag, ours := strings.CutPrefix(name, "NAMETAP_")
		flag = "--" + strings.ToLower(strings.ReplaceAll(flag, "_", "-")) + " "
		if ours && !strings.Contains(help, flag) || !ours && !strings.Contains(help, "["+name+"]") {
			t.Errorf("%s is not a setting of the agent", name)
		}
	}
}

// V3: nss-lookup.target waits until the agent reports that it is ready, which is after the
// rules are in (TestSystemd).
func TestBootOrder(t *testing.T) {
	t.Parallel()
	unit := read(t, "systemd/nametap.service")
	for _, line := range []string{"Type=notify", "Wants=nss-lookup.target", "Before=nss-lookup.target"} {
		if !strings.Contains(unit, "\n"+line+"\n") {
			t.Errorf("the unit has no line %q", line)
		}
	}
}

// V1: the sockets of a running agent do not begin to block when another service starts with them.
func TestSocketsDoNotBlock(t *testing.T) {
	t.Parallel()
	for _, name := range services {
		unit := read(t, "systemd/"+name)
		if strings.Contains(unit, "\nSockets=") != strings.Contains(unit, "\nNonBlocking=yes\n") {
			t.Errorf("%s: want NonBlocking=yes with Sockets=", name)
		}
	}
}

// TestUnitCommands checks that the binary accepts the commands of the units.
func TestUnitCommands(t *testing.T) {
	t.Parallel()
	for _, name := range services {
		commands := regexp.MustCompile(`(?m)^Exec\w+=.*/usr/local/bin/nametap (.*)$`).FindAllStringSubmatch(read(t, "systemd/"+name), -1)
		if len(commands) == 0 {
			t.Fatalf("%s runs no command", name)
		}
		for _, c := range commands {
			output(t, command(t, nil, "nametap", append(strings.Fields(c[1]), "--help")...))
		}
	}
}

// TestInstallIsFresh checks that `make install` installs a build of the current tree
// instead of an earlier one in bin/, with its commit, and that it needs no Go if nothing
// has changed.
func TestInstallIsFresh(t *testing.T) {
	t.Parallel()
	netns.Need(t, "make", "install", "git")
	tree, root := copyTree(t), t.TempDir()
	git := func(args ...string) string {
		t.Helper()
		cmd := command(t, nil, "git", append([]string{"-C", tree, "-c", "user.name=test", "-c", "user.email=test@example.com"}, args...)...)
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null")
		return strings.TrimSpace(output(t, cmd))
	}
	git("init", "-q")
	git("add", ".")
	git("commit", "-q", "-m", "all")
	install := func(variables ...string) {
		t.Helper()
		cmd := command(t, nil, "make", append([]string{"-C", tree, "install", "DESTDIR=" + root}, variables...)...)
		cmd.Env = append(os.Environ(), "GOFLAGS=-buildvcs=true")
		output(t, cmd)
	}
	binary := filepath.Join(root, "usr/local/bin/nametap")
	version := func() string {
		t.Helper()
		return output(t, command(t, nil, binary, "version", "--output", "json"))
	}

	stale := filepath.Join(tree, "bin/nametap")
	if err := os.MkdirAll(filepath.Dir(stale), 0o755); err != nil {
		t.Fatal(err)
	}
	other, err := os.ReadFile("/bin/true") // a program without commands
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(stale, other, 0o755); err != nil {
		t.Fatal(err)
	}
	past := time.Now().Add(-time.Hour)
	if err := os.Chtimes(stale, past, past); err != nil {
		t.Fatal(err)
	}
	install()
	if got, commit := version(), git("rev-parse", "HEAD"); !strings.Contains(got, commit) || strings.Contains(got, "dirty\"") {
		t.Errorf("%s is not of the clean commit %s", got, commit)
	}
	install("GO=false")

	main := filepath.Join(tree, "cmd/nametap/main.go")
	text := read(t, main)
	if err := os.WriteFile(main, []byte(text+"\n// An edit.\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	install()
	if got := version(); !strings.Contains(got, `"dirty": true`) {
		t.Errorf("after an edit: %s", got)
	}
}

// copyTree copies the repository without .git and build output.
func copyTree(t *testing.T) string {
	t.Helper()
	tree := filepath.Join(t.TempDir(), "nametap")
	err := filepath.WalkDir("..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel("..", path)
		switch {
		case err != nil:
			return err
		case rel == ".git" || rel == "bin" || strings.HasPrefix(rel, "coverage."):
			if entry.IsDir() {
				return fs.SkipDir
			}
			return nil
		case entry.IsDir():
			return os.MkdirAll(filepath.Join(tree, rel), 0o755)
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(tree, rel), data, info.Mode().Perm())
	})
	if err != nil {
		t.Fatal(err)
	}
	return tree
}
