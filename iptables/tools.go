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
		errTool, base, b, base)
}

// lookPath returns the path of a tool. It also looks in /usr/sbin and /sbin, which are often missing in the PATH
// of a user.
func (x toolbox) lookPath(name string) (string, error) {
	if x.dir != "" {
		if path, err := exec.LookPath(filepath.Join(x.dir, name)); err == nil {
			return path, nil
		}
	}
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

// plainBackend returns the backend of the tool without a backend in its name, or NFT if there
// is no such tool.
func (x toolbox) plainBackend(ctx context.Context) Backend {
	path, err := x.lookPath("iptables-restore")
	if err != nil {
		return NFT
	}
	if b, err := x.backendOf(ctx, path); err == nil {
		return b
	}
	return NFT
}

// backendOf returns the backend of a tool. Before version 1.8 there was only legacy.
func (x toolbox) backendOf(ctx context.Context, tool string) (Backend, error) {
	for n := 0; ; n++ {
		out, err := x.run(ctx, nil, tool, "--version")
		switch {
		case err == nil && bytes.Contains(out, []byte("nf_tables")):
			return NFT, nil
		case err == nil:
			return Legacy, nil
		case n == readAttempts-1 || !clock.Sleep(ctx, backOff(n)):
			return "", err
		}
	}
}

// read returns the rules in the kernel. It does not name single tables, because legacy creates every table that is
// named. After a failure that may pass, read tries again.
func (t tools) read(ctx context.Context) (saved, error) { return t.reading(ctx)() }

// reading starts a tool that reads the rules; the function wait returns the rules. With reading, one thread can
// start several tools that run at the same time. The thread may have a network namespace of its own, which the tools
// inherit.
func (t tools) reading(ctx context.Context) (wait func() (saved, error)) {
	first := t.start(ctx, nil, t.save)
	return func() (saved, error) { return t.parsed(ctx, first) }
}

// parsed returns the rules that a tool prints. It runs the tool again after a failure that may pass.
func (t tools) parsed(ctx context.Context, output func() ([]byte, error)) (saved, error) {
	for n := 0; ; n++ {
		out, err := output()
		output = func() ([]byte, error) { return t.run(ctx, nil, t.save) }
		var s saved
		if err == nil {
			s, err = parseSave(out)
		}
		if err == nil || failsAgain(err) || n == readAttempts-1 || !clock.Sleep(ctx, backOff(n)) {
			return s, err
		}
	}
}

// write passes text to iptables-restore.
func (t tools) write(ctx context.Context, text string) error {
	_, err := t.run(ctx, []byte(text), t.restore, "--noflush", "-w", lockWait)
	if err == nil || failsAgain(err) || t.backend != Legacy {
		return err
	}
	if missing := missingLegacyExtension(t.family, text); missing != "" {
		return fmt.Errorf("%w: %s: %w", errExtension, missing, err)
	}
	return err
}

// backOff returns how long to wait after the nth failure, counted from 0. The pause is longer each time, and partly
// random, because two programs that disturb each other must not retry at the same times.
func backOff(n int) time.Duration { return clock.Jitter(clock.BackOff(n, firstPause, longestPause)) }

// run runs a tool and returns its output.
func (x toolbox) run(ctx context.Context, stdin []byte, tool string, args ...string) ([]byte, error) {
	return x.start(ctx, stdin, tool, args...)()
}

// start starts a tool. The function wait waits for the end of the tool and returns its output.
func (x toolbox) start(ctx context.Context, stdin []byte, tool string, args ...string) (wait func() ([]byte, error)) {
	ctx, cancel := context.WithTimeout(ctx, x.limit)
	output := startCommand(ctx, exec.CommandContext(ctx, tool, args...), stdin)
	return func() ([]byte, error) {
		defer cancel()
		return output()
	}
}

func startCommand(ctx context.Context, cmd *exec.Cmd, stdin []byte) (wait func() ([]byte, error)) {
	out, errs := new(bytes.Buffer), new(bytes.Buffer)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), out, errs
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	if path := replacementLock(); path != "" {
		cmd.Env = append(cmd.Env, "XTABLES_LOCKFILE="+path)
	}
	cmd.WaitDelay = time.Second
	err := cmd.Start() // in this thread, which may have a network namespace of its own
	ended := make(chan error, 1)
	if err == nil {
		go func() { ended <- cmd.Wait() }()
	} else {
		ended <- err
	}
	return func() ([]byte, error) {
		select {
		case err = <-ended:
		case <-afterEnd(ctx, 2*cmd.WaitDelay):
			err = errUnkillable // the goroutine ends with the process
		}
		switch {
		case err == nil:
			return out.Bytes(), nil
		case errors.Is(err, errUnkillable):
			return nil, fmt.Errorf("running %s: %w: %w", filepath.Base(cmd.Path), err, ctx.Err())
		case ctx.Err() != nil:
			return nil, fmt.Errorf("running %s: %w", filepath.Base(cmd.Path), ctx.Err())
		}
		return nil, explain(filepath.Base(cmd.Path), err, errs.String())
	}
}

// errUnkillable is the error if the kernel has not ended a process that was killed.
var errUnkillable = errors.New("it was killed and does not end, because it waits in the kernel (state D in ps)")

// afterEnd returns a channel that is closed some time after ctx has ended.
func afterEnd(ctx context.Context, pause time.Duration) <-chan struct{} {
	late := make(chan struct{})
	context.AfterFunc(ctx, func() { time.AfterFunc(pause, func() { close(late) }) })
	return late
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
	const (
		forTable     = "load the kernel's modules (modprobe -a iptable_nat iptable_raw ip6table_nat ip6table_raw)"
		forExtension = "load the kernel's modules (modprobe -a xt_CT xt_REDIRECT xt_owner xt_comment xt_conntrack xt_hl xt_recent xt_tcpudp nft_compat), and install all extensions of the package iptables"
	)
	switch {
	case has("xtables lock"):
		return fail(errLocked, "another program holds "+lockFile+" for more than "+lockWait+
			" s; fuser -v "+lockFile+" shows which")
	case has("Permission denied", "Operation not permitted", "you must be root"):
		return fail(errPermission, refusal(message))
	case has("Address family not supported by protocol"):
		return fail(errNoFamily, "the other family is captured without it")
	case has("is incompatible, use 'nft' tool"):
		return fail(errNoTable, "the nft tool wrote rules into a table that iptables uses: keep them in a table of another name")
	case has("Table does not exist", "iptables who?", "ip6tables who?", "iptables: who?"):
		return fail(errNoTable, forTable)
	case has("unable to initialize table"): // legacy does not say why
		switch family := toolFamily(tool); {
		case !capable(unix.CAP_NET_ADMIN), !capable(unix.CAP_NET_RAW):
			return fail(errPermission, refusal(message))
		case lacksLegacyTable(family, cutBetween(message, "table '", "'")):
			return fail(errNoTable, forTable)
		}
	case has("missing kernel module?", "unknown option"),
		has("Couldn't load match", "Couldn't load target") && has("No such file or directory"),
		has("RULE_APPEND failed", "RULE_INSERT failed", "CHAIN_ADD failed", "TABLE_ADD failed", "CHAIN_USER_ADD failed") &&
			has("(No such file or directory)", "(Operation not supported)", "(Protocol not supported)", "(Invalid argument)"):
		return fail(errExtension, forExtension)
	case errors.Is(err, os.ErrPermission), strings.Contains(err.Error(), syscall.SIGSYS.String()):
		return fail(errPermission, refusal(message)) // the program is not allowed to run, or a filter has killed it
	case message == "":
		return fmt.Errorf("running %s: %w", tool, err)
	}
	return fmt.Errorf("running %s: %w: %q", tool, err, message)
}

// toolFamily returns the family of a tool by its name.
func toolFamily(tool string) family.Family {
	if strings.HasPrefix(tool, "ip6") {
		return family.IPv6
	}
	return family.IPv4
}

// cutBetween returns the part of text between start and end, or "".
func cutBetween(text, start, end string) string {
	_, rest, _ := strings.Cut(text, start)
	found, _, _ := strings.Cut(rest, end)
	return found
}
