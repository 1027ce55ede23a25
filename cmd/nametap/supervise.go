package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/agent/supervise"
	"github.com/nametap/nametap/internal/listen"
)

// superviseAgent runs this command again as a child process, which answers on the sockets of this process.
func superviseAgent(ctx context.Context, cfg agent.Config, signals agentSignals) error {
	if os.Getenv("NOTIFY_SOCKET") != "" {
		return usageError{errors.New("supervise: systemd restarts the agent itself, and nametap.socket holds its sockets: " +
			"want --supervise=false under systemd")}
	}
	runtime.GOMAXPROCS(1) // this process has one thing to do, and stays small
	specs := []listen.Spec{
		{Name: "DNS", Setting: dnsAddrFlag, Addr: cfg.DNS.Addr, Networks: []string{"udp", "tcp"}, Required: true},
		{Name: "the status address", Setting: statusAddrFlag, Addr: cfg.StatusAddr, Networks: []string{"tcp"}},
	}
	if cfg.Egress != nil {
		specs = append(specs, listen.Spec{Name: "connections to VIPs", Setting: egressAddrFlag, Addr: cfg.Egress.Addr, Networks: []string{"tcp"}})
	}
	held, args := []*os.File(nil), os.Args
	for _, spec := range specs {
		args = append(args, "--"+spec.Setting+"="+spec.Addr) // also after a file of settings has changed
		if _, port, err := listen.SplitAddr(spec.Setting, spec.Addr); err == nil && port == 0 {
			return usageError{fmt.Errorf("%s %q: want a port other than 0 with --supervise", spec.Setting, spec.Addr)}
		}
		spec.FreeBind, spec.Log = true, cfg.Logger
		set, err := listen.New(spec, nil)
		if err == nil {
			err = set.Open(ctx) // the agent opens the rest later
		}
		if err != nil {
			return err
		}
		files, err := set.Files()
		if err != nil {
			return err
		}
		held = append(held, files...)
	}
	code, err := supervise.Run(supervise.Config{
		// The program of this process, even if the file was replaced since.
		Path: "/proc/self/exe", Args: args, Env: os.Environ(), Sockets: held, EndSignals: signals.end, Log: cfg.Logger,
	})
	if err != nil || code == 0 {
		return err
	}
	return exitError(code)
}
