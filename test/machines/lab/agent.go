package lab

import (
	"cmp"
	"os"
	"os/exec"
	"strings"
	"syscall"
)

// The addresses of an agent and the user that it runs as.
const (
	AgentDNS    = "127.0.0.1:15053"
	AgentStatus = "127.0.0.1:15020"
	AgentID     = 1337

	capNetAdmin = 12
)

// An Agent is a running nametap agent.
type Agent struct {
	*Process
	Place           *Place
	Name, Namespace string // of its workload
}

// AgentCommand returns the command of an agent of a workload, with flags and the status address above.
func (p *Place) AgentCommand(name, namespace string, flags ...string) *exec.Cmd {
	p.TB.Helper()
	args := append([]string{"agent", "--pod-name", name, "--namespace", namespace, "--status-addr", AgentStatus}, flags...)
	cmd := exec.Command(Program(p.TB, "nametap"), args...)
	cmd.Env = append(os.Environ(), p.runtime())
	return cmd
}

// Launch starts an agent without waiting.
func (p *Place) Launch(name, namespace string, flags ...string) *Agent {
	p.TB.Helper()
	return &Agent{Process: p.Spawn(name, p.AgentCommand(name, namespace, flags...)), Place: p, Name: name, Namespace: namespace}
}

// runtime is the setting of the directory in which the private socket of an agent is.
func (p *Place) runtime() string { return "RUNTIME_DIRECTORY=" + cmp.Or(p.Runtime, p.Dir) }

// Unprivileged makes a command run as the agent's user, who may set rules.
func Unprivileged(cmd *exec.Cmd) *exec.Cmd {
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: AgentID, Gid: AgentID}, AmbientCaps: []uintptr{capNetAdmin}, Setsid: true,
	}
	return cmd
}

// Agent starts an agent, and returns when it has a table.
func (p *Place) Agent(name, namespace string, flags ...string) *Agent {
	p.TB.Helper()
	a := p.Launch(name, namespace, flags...)
	a.Await("the agent has a table", func() bool { return a.Logged("msg=ready") > 0 })
	return a
}

// Nametap runs one of nametap's commands for the agent of the place.
func (p *Place) Nametap(args ...string) string {
	p.TB.Helper()
	text, err := p.Try("", []string{p.runtime()}, append(append([]string{Program(p.TB, "nametap")}, args...), "--status-addr", AgentStatus)...)
	if err != nil {
		p.TB.Fatalf("nametap %s: %v\n%s", strings.Join(args, " "), err, text)
	}
	return text
}

// Discovery starts nametap-discovery with more environment and flags, and returns when it is ready by its status address.
func (p *Place) Discovery(name, status string, env []string, flags ...string) *Process {
	p.TB.Helper()
	cmd := exec.Command(Program(p.TB, "nametap-discovery"), append([]string{"--http-addr", status}, flags...)...)
	cmd.Env = append(os.Environ(), env...)
	d := p.Spawn(name, cmd)
	d.Await("nametap-discovery is ready", func() bool {
		code, _ := p.Get("http://" + status + "/healthz/ready")
		return code == 200
	})
	return d
}
