package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
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

const (
	// readAttempts is how often rules are read when that fails.
	readAttempts = 5
	// firstPause and longestPause are between two attempts; the last are on average.
	firstPause, longestPause = 10 * time.Millisecond, 250 * time.Millisecond
)

// tools are the two programs for one family in one backend.
type tools struct {
	save, restore string
	backend       Backend
	family        Family
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
		if prefix == base {
			found, err := backendOf(ctx, restore)
			if err != nil {
				return tools{}, fmt.Errorf("asking %s for its backend: %w", prefix, err)
			}
			if found != b {
				continue
			}
		}
		return tools{save: save, restore: restore, backend: b, family: f}, nil
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
func backendOf(ctx context.Context, tool string) (Backend, error) {
	for n := 0; ; n++ {
		out, err := run(ctx, nil, tool, "--version")
		switch {
		case err == nil && bytes.Contains(out, []byte("nf_tables")):
			return NFT, nil
		case err == nil:
			return Legacy, nil
		case n == readAttempts-1 || !pause(ctx, n):
			return "", err
		}
	}
}

// read returns what is in the kernel. It names no table, since legacy makes
// every table that it is asked for. A failure that may pass is tried again.
func (t tools) read(ctx context.Context) (saved, error) {
	for n := 0; ; n++ {
		out, err := run(ctx, nil, t.save)
		var s saved
		if err == nil {
			s, err = parseSave(out)
		}
		if err == nil || lasts(err) || n == readAttempts-1 || !pause(ctx, n) {
			return s, err
		}
	}
}

// write gives text to iptables-restore.
func (t tools) write(ctx context.Context, text string) error {
	_, err := run(ctx, []byte(text), t.restore, "--noflush", "-w", lockWait)
	if err == nil || lasts(err) || t.backend != Legacy {
		return err
	}
	if missing := lacksLegacyExtension(t.family, text); missing != "" {
		return fmt.Errorf("%w: %s: %w", errExtension, missing, err)
	}
	return err
}

// backOff returns how long to wait after the nth failure, counted from 0: longer each
// time, and at random, so that two programs that disturb each other get out of step.
func backOff(n int) time.Duration {
	wait := longestPause
	if n < 10 { // a larger shift overflows in the end
		wait = min(firstPause<<n, longestPause)
	}
	return wait + rand.N(wait)
}

// pause waits after the nth failure, and returns false if ctx ends.
func pause(ctx context.Context, n int) bool {
	select {
	case <-time.After(backOff(n)):
		return true
	case <-ctx.Done():
		return false
	}
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
