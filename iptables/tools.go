package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Why a tool failed, where it makes a difference to us. Any other failure means
// that the kernel or the tool did not take the rules.
var (
	errTool       = errors.New("tool is missing")
	errLocked     = errors.New("lock is held")
	errPermission = errors.New("not permitted")
	errNoTable    = errors.New("no such table in this kernel")
)

const (
	// lockWait is for how long iptables-restore waits for the lock of the
	// legacy backend, in seconds. Without -w it waits for ever.
	lockWait = "5"
	// execLimit is for how long any tool may run: the lock's time, and what a
	// name service takes that iptables asks even for a numeric uid.
	execLimit = 15 * time.Second
	// lockFile is legacy's lock, unless XTABLES_LOCKFILE says otherwise.
	lockFile = "/run/xtables.lock"
)

// tools are the two programs for one family in one backend.
type tools struct {
	save, restore string
}

// findTools finds them: by the names that belong to a backend, or else by those
// that every iptables has, if they belong to that backend.
func findTools(ctx context.Context, b Backend, f Family) (tools, error) {
	base := "iptables"
	if f == IPv6 {
		base = "ip6tables"
	}
	for _, prefix := range []string{base + "-" + string(b), base} {
		save, err := lookPath(prefix + "-save")
		if err != nil {
			continue
		}
		restore, err := lookPath(prefix + "-restore")
		if err != nil {
			continue
		}
		if prefix == base && backendOf(ctx, restore) != b {
			continue
		}
		return tools{save: save, restore: restore}, nil
	}
	return tools{}, fmt.Errorf("%w: neither %s-%s-restore nor %s-restore of this backend is in $PATH, /usr/sbin or /sbin; install the package iptables",
		errTool, base, b, base)
}

// lookPath also looks where these tools are, since users' PATHs often lack it.
func lookPath(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err == nil {
		return path, nil
	}
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if path, err2 := exec.LookPath(filepath.Join(dir, name)); err2 == nil {
			return path, nil
		}
	}
	return "", err
}

// backendOf asks a tool for its backend; before version 1.8 there was one only.
func backendOf(ctx context.Context, tool string) Backend {
	out, err := run(ctx, nil, tool, "--version")
	switch {
	case err != nil:
		return ""
	case bytes.Contains(out, []byte("nf_tables")):
		return NFT
	default:
		return Legacy
	}
}

// read returns what is in the kernel. It names no table, since legacy makes
// every table that it is asked for.
func (t tools) read(ctx context.Context) (saved, error) {
	out, err := run(ctx, nil, t.save)
	if err != nil {
		return nil, err
	}
	return parseSave(out)
}

// write gives text to iptables-restore.
func (t tools) write(ctx context.Context, text string) error {
	_, err := run(ctx, []byte(text), t.restore, "--noflush", "-w", lockWait)
	return err
}

// run runs a tool and returns what it prints.
func run(ctx context.Context, stdin []byte, tool string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, execLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, tool, args...)
	return runCommand(ctx, cmd, stdin)
}

func runCommand(ctx context.Context, cmd *exec.Cmd, stdin []byte) ([]byte, error) {
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &out, &errs
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	if path := replacementLock(); path != "" {
		cmd.Env = append(cmd.Env, "XTABLES_LOCKFILE="+path)
	}
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	if err == nil {
		return out.Bytes(), nil
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("running %s: %w", filepath.Base(cmd.Path), ctx.Err())
	}
	return nil, explain(filepath.Base(cmd.Path), err, errs.String())
}

// replacementLock returns a lock for legacy where its own cannot be made (a
// container with a read-only root), or "". Nobody else in such a container
// could make it either, so any file that can be opened does; /dev/null is
// there always.
func replacementLock() string {
	if os.Getenv("XTABLES_LOCKFILE") != "" {
		return ""
	}
	f, err := os.OpenFile(lockFile, os.O_CREATE, 0o600)
	if err == nil {
		_ = f.Close()
		return ""
	}
	if errors.Is(err, syscall.EROFS) || errors.Is(err, fs.ErrNotExist) {
		return os.DevNull
	}
	return ""
}

// explain turns a tool's failure into an error that says what to do.
func explain(tool string, err error, stderr string) error {
	said := strings.TrimSpace(stderr)
	has := func(texts ...string) bool {
		return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(said, text) })
	}
	fail := func(why error, advice string) error {
		return fmt.Errorf("running %s: %w (%w: %q): %s", tool, why, err, said, advice)
	}
	switch {
	case has("xtables lock"):
		return fail(errLocked, "another program holds "+lockFile+" for more than "+lockWait+
			" s; fuser -v "+lockFile+" shows which")
	case has("Permission denied", "Operation not permitted", "you must be root"):
		return fail(errPermission, "it takes CAP_NET_ADMIN, and for legacy CAP_NET_RAW and, if not root, CAP_DAC_READ_SEARCH, in the user namespace that owns the network namespace")
	case has("Table does not exist", "can't initialize ip"):
		return fail(errNoTable, "load the kernel's modules (modprobe -a iptable_nat iptable_raw ip6table_nat ip6table_raw), or use the other backend")
	case has("is incompatible, use 'nft' tool"):
		return fail(errNoTable, "the nft tool wrote rules into a table that iptables uses; choose the backend legacy")
	case has("Couldn't load match", "Couldn't load target"):
		return fmt.Errorf("running %s: %w: %q: install the extensions that come with the package iptables", tool, err, said)
	case said == "":
		return fmt.Errorf("running %s: %w", tool, err)
	default:
		return fmt.Errorf("running %s: %w: %q", tool, err, said)
	}
}
