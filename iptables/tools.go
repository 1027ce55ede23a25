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
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/family"
)

const (
	// lockWait is how long iptables-restore waits for the lock of the legacy backend, in
	// seconds. Without -w it waits forever.
	lockWait = "5"
	// lockFile is the lock file of legacy, unless XTABLES_LOCKFILE names another file.
	lockFile = "/run/xtables.lock"
)

const (
	// readAttempts is how often reading the rules is tried.
	readAttempts = 5
	// firstPause is the longest pause after the first failure. longestPause is the longest pause after any failure.
	firstPause, longestPause = 20 * time.Millisecond, 500 * time.Millisecond
)

// tools are the programs for one family in one backend.
type tools struct {
	toolbox
	save, restore string
	backend       Backend
	family        family.Family
}

// A toolbox finds the tools, and bounds how long a tool may run.
type toolbox struct {
	dir   string        // the directory to look in first; "" for none
	limit time.Duration // how long a tool may run
}

// newToolbox returns the toolbox of a configuration with defaults.
func newToolbox(c Config) toolbox { return toolbox{c.ToolDir, c.Patience} }

// find returns the tools with the backend in their names, such as iptables-nft-save. If there are none, it returns
// the tools without a backend in their names, such as iptables-save, if they use that backend.
func (x toolbox) find(ctx context.Context, b Backend, f family.Family) (tools, error) {
	base := "iptables"
	if f == family.IPv6 {
		base = "ip6tables"
	}
	for _, prefix := range []string{base + "-" + string(b), base} {
		save, err := x.lookPath(prefix + "-save")
		if err != nil {
			continue
		}
		restore, err := x.lookPath(prefix + "-restore")
		if err != nil {
			continue
		}
		if prefix == base {
			found, err := x.backendOf(ctx, restore)
			if err != nil {
				return tools{}, fmt.Errorf("finding out the backend of %s: %w", prefix, err)
			}
			if found != b {
				continue
			}
		}
		return tools{toolbox: x, save: save, restore: restore, backend: b, family: f}, nil
	}
	return tools{}, fmt.Errorf("%w: neither %s-%s-restore nor %s-restore of this backend is in $PATH, /usr/sbin or /sbin; install the package iptables",
		errMissing, base, b, base)
}

// lookPath returns the path of a tool. It also looks in /usr/sbin and /sbin, which are often missing in the PATH
// of a user.
func (x toolbox) lookPath(name string) (path string, err error) {
	for _, dir := range []string{x.dir, "", "/usr/sbin", "/sbin"} {
		if path, err = exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path, nil
		}
	}
	return "", err
}

// plainBackend returns the backend of the tool without a backend in its name, or NFT if there
// is no such tool.
func (x toolbox) plainBackend(ctx context.Context) Backend {
	if path, err := x.lookPath("iptables-restore"); err == nil {
		if b, err := x.backendOf(ctx, path); err == nil {
			return b
		}
	}
	return NFT
}

// backendOf returns the backend of a tool. Before version 1.8 there was only legacy.
func (x toolbox) backendOf(ctx context.Context, tool string) (Backend, error) {
	out, err := x.run(ctx, nil, tool, "--version")
	if bytes.Contains(out, []byte("nf_tables")) {
		return NFT, err
	}
	return Legacy, err
}

// read returns the rules in the kernel, with counters if args has -c. It does not name single tables, because legacy creates
// every table that is named. After a failure that may pass, read tries again.
func (t tools) read(ctx context.Context, args ...string) (saved, error) {
	for n := 0; ; n++ {
		out, err := t.run(ctx, nil, t.save, args...)
		var s saved
		if err == nil {
			s, err = parseSave(out)
		}
		if !temporary(err) || errors.Is(err, context.DeadlineExceeded) || n == readAttempts-1 || !clock.Sleep(ctx, backOff(n)) {
			return s, err
		}
	}
}

// write passes text to iptables-restore.
func (t tools) write(ctx context.Context, text string) error {
	_, err := t.run(ctx, []byte(text), t.restore, "--noflush", "-w", lockWait)
	return err
}

// backOff returns how long to wait after the nth failure, counted from 0. The pause is longer each time, and partly
// random, because two programs that disturb each other must not retry at the same times.
func backOff(n int) time.Duration { return clock.Jitter(clock.BackOff(n, firstPause, longestPause)) }

// run runs a tool and returns its output.
func (x toolbox) run(ctx context.Context, stdin []byte, tool string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, x.limit)
	defer cancel()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(ctx, tool, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &out, &errs
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	if path := replacementLock(); path != "" {
		cmd.Env = append(cmd.Env, "XTABLES_LOCKFILE="+path)
	}
	cmd.WaitDelay = time.Second
	switch err := cmd.Run(); {
	case err == nil:
		return out.Bytes(), nil
	case ctx.Err() != nil:
		return nil, fmt.Errorf("running %s: %w", filepath.Base(tool), ctx.Err())
	default:
		return nil, explain(filepath.Base(tool), err, errs.String())
	}
}

// replacementLock returns another lock file for legacy if legacy's own lock file cannot be made (a container with a
// read-only root). Otherwise it returns "". No other program in such a container can make legacy's own lock file
// either, so any file that can be opened will do; /dev/null always exists.
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

// explain turns the failure of a tool into an error that says what to do. It recognises the
// messages of iptables 1.6 to 1.8.11, which print errors of the kernel as strerror(3) does.
func explain(tool string, err error, stderr string) error {
	message := strings.TrimSpace(stderr)
	has := func(texts ...string) bool {
		return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(message, text) })
	}
	fail := func(why error, advice string) error {
		return fmt.Errorf("running %s: %w (%w: %q): %s", tool, why, err, message, advice)
	}
	switch {
	case has("xtables lock"):
		return fmt.Errorf("running %s: %w: %q: another program holds %s for more than %s s; fuser -v %s shows which", tool, err, message, lockFile, lockWait, lockFile)
	case has("is incompatible, use 'nft' tool"):
		return fail(errRefused, "the nft tool wrote rules into a table that iptables uses: keep them in a table of another name")
	case has("Permission denied", "Operation not permitted", "you must be root"),
		has("unable to initialize table") && (!capable(unix.CAP_NET_ADMIN) || !capable(unix.CAP_NET_RAW)), // legacy does not say why
		errors.Is(err, os.ErrPermission), strings.Contains(err.Error(), syscall.SIGSYS.String()): // the program may not run, or a filter has killed it
		return fail(errRefused, refusal(message))
	case has("Failed to initialize nft: Protocol not supported"):
		return fail(errMissing, "the kernel has no nf_tables")
	case has("Address family not supported by protocol"):
		return fail(errMissing, "the other family is captured without it")
	case has("Table does not exist", "who?", "unable to initialize table"):
		return fail(errMissing, "load the kernel's modules (modprobe -a iptable_nat iptable_raw ip6table_nat ip6table_raw)")
	case has("missing kernel module?", "unknown option", "Couldn't load match"), has("Couldn't load target") && has("No such file or directory"),
		legacyFailed.MatchString(message),
		has("RULE_APPEND failed", "RULE_INSERT failed", "CHAIN_ADD failed", "TABLE_ADD failed", "CHAIN_USER_ADD failed") &&
			has("(No such file or directory)", "(Operation not supported)", "(Protocol not supported)", "(Invalid argument)"):
		return fail(errMissing, "load the kernel's modules ("+modules+"), and install all extensions of the package iptables; "+
			"in a user namespace, the agent needs a uid and a gid that /proc/self/uid_map and gid_map have")
	case message == "":
		return fmt.Errorf("running %s: %w", tool, err)
	}
	return fmt.Errorf("running %s: %w: %q", tool, err, message)
}

// legacyFailed matches the message of iptables-legacy if the kernel refuses a table. It does not say why; as a rule, the
// kernel lacks a match or a target.
var legacyFailed = regexp.MustCompile(`^ip6?tables-[a-z-]*restore: line \d+ failed`)

// modules is the command that loads the modules for the rules.
const modules = "modprobe -a nf_nat xt_CT xt_REDIRECT xt_owner xt_comment xt_conntrack xt_hl xt_recent xt_tcpudp ipt_REJECT ip6t_REJECT, and for nft nft_compat"
