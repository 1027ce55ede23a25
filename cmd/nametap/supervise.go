package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/agent/supervise"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/egress"
	"github.com/nametap/nametap/internal/sockets"
)

// removeTimeout bounds the removal of rules that redirect to an agent that does not start.
const removeTimeout = 30 * time.Second

// superviseAgent runs this command again as a child process, which answers on the sockets of this process.
func superviseAgent(ctx context.Context, cfg agent.Config, signals agentSignals) error {
	if os.Getenv("NOTIFY_SOCKET") != "" {
		return usageError{errors.New("supervise: systemd restarts the agent itself, and nametap.socket holds its sockets: " +
			"want --supervise=false under systemd")}
	}
	if err := fixedPorts(cfg); err != nil {
		return usageError{err}
	}
	runtime.GOMAXPROCS(1) // otherwise, Go would wake another thread at each probe
	files, err := dnsproxy.OpenSockets(ctx, cfg.DNS.Addr, cfg.Logger)
	if err != nil {
		return err
	}
	status, err := agent.OpenStatusSockets(ctx, cfg.StatusAddr, cfg.Logger)
	if err != nil {
		return err
	}
	files = append(files, status...)
	if cfg.Egress != nil {
		more, err := egress.OpenSockets(ctx, cfg.Egress.Addr, cfg.Logger)
		if err != nil {
			return err
		}
		files = append(files, more...)
	}
	running := supervise.Config{
		// The program of this process, even if the file was replaced since.
		Path: "/proc/self/exe", Args: os.Args, Env: os.Environ(), Sockets: files,
		EndSignals: signals.end, Log: cfg.Logger,
	}
	if cfg.Capture != nil {
		running.Abandoned = func() { removeRules(context.WithoutCancel(ctx), cfg) }
	}
	code, err := supervise.Run(running)
	if err != nil {
		return err
	}
	if code != 0 {
		return exitError(code)
	}
	return nil
}

// fixedPorts returns an error if the kernel would choose a port.
func fixedPorts(cfg agent.Config) error {
	addrs := map[string]string{dnsAddrFlag: cfg.DNS.Addr}
	if cfg.Egress != nil {
		addrs[egressAddrFlag] = cfg.Egress.Addr
	}
	for setting, addr := range addrs {
		_, port, err := sockets.SplitAddr(setting, addr)
		if err != nil {
			return err
		}
		if port == 0 {
			return fmt.Errorf("%s %q: want a port other than 0 with --supervise", setting, addr)
		}
	}
	return nil
}

// removeRules removes the capture rules of an agent that has crashed, unless the settings say that the rules stay. It
// runs another process for this, because this process has to stay small.
func removeRules(ctx context.Context, cfg agent.Config) {
	if cfg.Capture.Config.FailClosed {
		return
	}
	defer debug.FreeOSMemory() // this process stays small
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	remove := exec.CommandContext(ctx, "/proc/self/exe", "capture", "remove", "--after-agent", "--capture-fail-open")
	remove.Args[0] = os.Args[0]
	remove.Stdout, remove.Stderr = os.Stdout, os.Stderr
	if err := remove.Run(); err != nil {
		cfg.Logger.Error("the capture rules may still be installed: `nametap capture remove` removes them", "error", err)
	}
}
