package test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"syscall"
)

// A result is the output and the exit code of a command.
type result struct {
	stdout, stderr string
	code           int
}

// run runs a command and returns its result. A command that fails does not fail the test.
func (h *host) run(cmd *exec.Cmd) result {
	h.tb.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := h.Start(cmd)
	if err == nil {
		machine.follow(h.tb, cmd.Process.Pid)
		err = cmd.Wait()
	}
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		h.tb.Fatalf("%s: %v", cmd, err)
	}
	return result{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// nametap runs a subcommand as the agent's user.
func (h *host) nametap(args ...string) result {
	h.tb.Helper()
	return h.run(h.command(args...))
}

// root runs a subcommand as root, as an init container does.
func (h *host) root(args ...string) result {
	h.tb.Helper()
	cmd := h.command(args...)
	cmd.SysProcAttr = nil
	return h.run(cmd)
}

// args returns the arguments of a subcommand of capture, with the VM's flags.
func (v *vm) args(subcommand string, flags ...string) []string {
	return slices.Concat([]string{"capture", subcommand}, v.flags, flags)
}

// command returns a call of nametap by the agent's user, with the environment and the
// capabilities of the unit.
func (h *host) command(args ...string) *exec.Cmd {
	cmd := exec.Command(binary(h.tb), args...)
	if h.descriptors > 0 {
		cmd = exec.Command("prlimit", append([]string{fmt.Sprintf("--nofile=%d", h.descriptors), binary(h.tb)}, args...)...)
	}
	cmd.Env = append(slices.Concat(os.Environ(), []string{"RUNTIME_DIRECTORY=" + h.runDir()}, h.environment), "POD_NAME=web-0", "POD_NAMESPACE=shop", "INSTANCE_IP=10.1.2.3")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential:  &syscall.Credential{Uid: agentID, Gid: agentID},
		AmbientCaps: h.capabilities,
		Pdeathsig:   syscall.SIGKILL,
		Setsid:      true, // without the terminal of the test, if there is one
	}
	if h.sameUser {
		cmd.SysProcAttr.Credential, cmd.SysProcAttr.AmbientCaps = nil, nil
	}
	return cmd
}
