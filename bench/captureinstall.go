package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/nametap/nametap/bench/lab"

	"github.com/nametap/nametap/bench/report"
)

// Names of the figures of installing rules.
const (
	installWhole    = "apply_ms"
	installRestore4 = "restore_ipv4_ms"
	installRestore6 = "restore_ipv6_ms"
	installRestores = "restores_ms"
	installSingly   = "one_by_one_ms"
	installExecs    = "one_by_one_execs"
	installRemove   = "remove_ms"
)

// installs measures the time to install the default rules in each backend: by apply, by iptables-restore with the text
// of apply, and rule by rule. Each of these three ways starts in an empty namespace.
func (b *captureBench) installs(ctx context.Context, round int) error {
	for _, p := range b.paths {
		if p.backend == "" {
			continue
		}
		if b.installed[p.backend] == nil {
			b.installed[p.backend] = report.Figures{}
		}
		set := func(name string, value float64) { b.installed[p.backend].Set(name, round, value) }
		for _, way := range []func() error{
			func() error { return b.applied(ctx, p, set) },
			func() error { return b.restored(ctx, p, set) },
			func() error { return b.singly(ctx, p, set) },
		} {
			if err := lab.InNetspace(way); err != nil {
				return fmt.Errorf("%s: %w", p.what, err)
			}
		}
	}
	return nil
}

// applied measures the commands apply and remove of `nametap capture`.
func (b *captureBench) applied(ctx context.Context, p path, set func(string, float64)) error {
	took, err := b.apply(ctx, p)
	if err != nil {
		return err
	}
	set(installWhole, inMilliseconds(took))
	began := time.Now()
	if _, err := b.tool(ctx, "", b.binary, "capture", "remove"); err != nil {
		return err
	}
	set(installRemove, inMilliseconds(time.Since(began)))
	return nil
}

// apply installs the rules of a path, and returns the time that this took.
func (b *captureBench) apply(ctx context.Context, p path) (time.Duration, error) {
	if p.backend == "" {
		return 0, nil
	}
	if err := b.choose(ctx, p); err != nil {
		return 0, err
	}
	began := time.Now()
	_, err := b.tool(ctx, "", b.captureArguments("apply")...)
	return time.Since(began), err
}

// choose makes nametap use the backend of a path in this namespace: it makes a chain in this backend, and nametap uses
// the backend that has chains of other programs.
func (b *captureBench) choose(ctx context.Context, p path) error {
	for _, tool := range []string{"iptables-", "ip6tables-"} {
		if _, err := b.tool(ctx, "", tool+p.backend, "-w", "5", "-N", "OTHER"); err != nil {
			return err
		}
	}
	return nil
}

// captureArguments returns the arguments of a capture command.
func (b *captureBench) captureArguments(verb string) []string {
	return []string{
		b.binary, "capture", verb, "--capture-enabled", "--log-level", "warn",
		"--dns-addr", fmt.Sprintf("localhost:%d", agentPort), "--capture-agent-uid", strconv.Itoa(agentUser), "--capture-agent-gid", strconv.Itoa(agentUser),
	}
}

// A step is a program that apply runs, and its input.
type step struct{ Program, Text string }

// steps returns the steps of apply, one for each family, IPv4 first.
func (b *captureBench) steps(ctx context.Context, p path) ([]step, error) {
	if err := b.choose(ctx, p); err != nil {
		return nil, err
	}
	text, err := b.tool(ctx, "", append(b.captureArguments("print"), "--output", "json")...)
	if err != nil {
		return nil, err
	}
	var steps []step
	if err := json.Unmarshal([]byte(text), &steps); err != nil || len(steps) != 2 {
		return nil, fmt.Errorf("reading the rules of %s: want two steps: %w: %s", p.what, err, text)
	}
	return steps, nil
}

// restored measures iptables-restore alone.
func (b *captureBench) restored(ctx context.Context, p path, set func(string, float64)) error {
	steps, err := b.steps(ctx, p)
	if err != nil {
		return err
	}
	all := time.Duration(0)
	for i, figure := range []string{installRestore4, installRestore6} {
		began := time.Now()
		if _, err := b.tool(ctx, steps[i].Text, strings.Fields(steps[i].Program)...); err != nil {
			return err
		}
		took := time.Since(began)
		set(figure, inMilliseconds(took))
		all += took
	}
	set(installRestores, inMilliseconds(all))
	return nil
}

// singly measures running iptables once for each line.
func (b *captureBench) singly(ctx context.Context, p path, set func(string, float64)) error {
	steps, err := b.steps(ctx, p)
	if err != nil {
		return err
	}
	var commands [][]string
	for _, s := range steps {
		program, _, _ := strings.Cut(s.Program, "-restore ")
		for _, arguments := range oneByOne(s.Text) {
			commands = append(commands, append([]string{program, "-w", "5"}, arguments...))
		}
	}
	began := time.Now()
	for _, command := range commands {
		if _, err := b.tool(ctx, "", command...); err != nil {
			return err
		}
	}
	set(installSingly, inMilliseconds(time.Since(began)))
	set(installExecs, float64(len(commands)))
	return nil
}

// oneByOne turns the text for iptables-restore into arguments of iptables.
func oneByOne(text string) [][]string {
	var commands [][]string
	table := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "*"):
			table = line[1:]
		case strings.HasPrefix(line, ":"):
			name, _, _ := strings.Cut(line[1:], " ")
			commands = append(commands, []string{"-t", table, "-N", name})
		case strings.HasPrefix(line, "-"):
			commands = append(commands, append([]string{"-t", table}, words(line)...))
		}
	}
	return commands
}

// words splits at spaces outside of quotes, and removes the quotes. The comments of
// nametap's rules contain no quotes.
func words(line string) []string {
	var all []string
	for i, part := range strings.Split(line, `"`) {
		if i%2 == 1 {
			all = append(all, part)
		} else {
			all = append(all, strings.Fields(part)...)
		}
	}
	return all
}

// tool runs a command with text as its input. Of the environment, the command gets only PATH. Its lock file is in the
// lab, so it does not wait for other programs.
func (b *captureBench) tool(ctx context.Context, text string, argv ...string) (string, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + b.lab.Dir, "XTABLES_LOCKFILE=" + b.lab.Path("xtables.lock")}
	cmd.Stdin = strings.NewReader(text)
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, exit.Stderr)
		}
		return "", fmt.Errorf("running %s: %w", filepath.Base(argv[0]), err)
	}
	return string(out), nil
}

// inMilliseconds returns d as a number of ms.
func inMilliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// installTable compares the ways to install rules.
func (b *captureBench) installTable() report.Table {
	t := report.Table{
		Title: fmt.Sprintf("Installing the rules of both families, ms, medians of %d rounds", b.rounds),
		Header: []string{
			"backend", "capture apply", "its restore IPv4", "its restore IPv6", "rule by rule", "execs", "× both restores", "capture remove",
		},
	}
	for _, p := range b.paths {
		f := b.installed[p.backend]
		if p.backend == "" {
			continue
		}
		row := []string{p.backend}
		for _, f := range []report.Figure{f[installWhole], f[installRestore4], f[installRestore6], f[installSingly], f[installExecs]} {
			row = append(row, report.Cell(f.Median()))
		}
		row = append(row, report.Cell(f[installSingly].Over(f[installRestores]).Median()), report.Cell(f[installRemove].Median()))
		t.Rows = append(t.Rows, row)
	}
	return t
}
