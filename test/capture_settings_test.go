package test

import (
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// unitVariables are the settings in /etc/default/nametap.
const unitVariables = "NAMETAP_STATUS_ADDR='" + statusAddr + "'\nNAMETAP_CAPTURE_EXCLUDE_UID=\"994\"\n"

// unit runs a command of nametap as root, with a file at /etc/default and with a systemctl that prints a text;
// "" means that systemd does not answer.
func (v *vm) unit(systemctl string, args ...string) result {
	v.tb.Helper()
	script := "#!/bin/sh\nexit 1\n"
	if systemctl != "" {
		script = "#!/bin/sh\ncat <<'.'\n" + systemctl + ".\n"
	}
	if err := os.Mkdir(v.dir+"/bin", 0o755); err != nil && !os.IsExist(err) {
		v.tb.Fatal(err)
	}
	v.script("bin/systemctl", script)
	cmd := v.command(args...)
	cmd.SysProcAttr = nil
	cmd.Env = append(cmd.Env, "PATH="+v.dir+"/bin:"+os.Getenv("PATH"))
	cmd.Args = append([]string{"unshare", "--mount", "sh", "-c", `mount -t tmpfs tmpfs /etc/default && cp "$0" /etc/default/nametap && exec "$@"`,
		v.write("default", unitVariables), cmd.Path}, args...)
	cmd.Path = "/usr/bin/unshare"
	return v.run(cmd)
}

// TestCaptureSettings checks that commands for capture find the settings of the running agent, and without
// one those of its unit. Flags and the environment win.
func TestCaptureSettings(t *testing.T) { // K22
	t.Parallel()
	v := newVM(t, "nft")
	want := func(what string, r result, parts ...string) {
		t.Helper()
		if r.code != 0 {
			t.Errorf("%s: %+v", what, r)
		}
		for _, part := range parts {
			if !strings.Contains(r.stdout, part) {
				t.Errorf("%s: %q is not in %+v", what, part, r)
			}
		}
	}
	config := v.write("nametap.yaml", "capture-exclude-uid: [991]\n")
	a := v.capture("--config", config, "--capture-exclude-cidr", "10.9.0.0/16")
	at := []string{"--status-addr", statusAddr}
	for _, subcommand := range []string{"status", "check", "apply", "print"} {
		r := v.root(slices.Concat([]string{"capture", subcommand}, at)...)
		want(subcommand, r, "then the running agent")
	}
	want("print", v.root("capture", "print", "--status-addr", statusAddr), "--uid-owner 991", "-d 10.9.0.0/16")
	want("a flag", v.root("capture", "print", "--status-addr", statusAddr, "--capture-exclude-uid", "992"), "--uid-owner 992", "-d 10.9.0.0/16")
	v.environment = append(v.environment, "NAMETAP_CAPTURE_EXCLUDE_UID=993")
	want("the environment", v.root("capture", "print", "--status-addr", statusAddr), "--uid-owner 993", "-d 10.9.0.0/16")
	v.environment = nil
	r := v.root("capture", "print", "--status-addr", statusAddr, "--config", config)
	want("another file", r, "# settings: flags and the environment, and the files that they name\n")
	if strings.Contains(r.stdout, "-A NAMETAP_OUTPUT -d 10.9.0.0/16") {
		t.Errorf("another file: %+v", r)
	}

	// The unit says where the agent is.
	want("its address", v.unit("", "capture", "print"), "then the running agent", "--uid-owner 991")
	a.end(syscall.SIGKILL)
	want("its unit", v.unit("", "capture", "print"), "then /etc/default/nametap (no agent answers)", "--uid-owner 994")
	more := v.write("more", "NAMETAP_CAPTURE_EXCLUDE_UID=996\n")
	want("a drop-in", v.unit("Environment=NAMETAP_CAPTURE_EXCLUDE_UID=995 \"NAMETAP_CAPTURE_EXCLUDE_CIDR=10.8.0.0/16\"\nEnvironmentFiles=/etc/default/nametap (ignore_errors=yes)\n"+
		"EnvironmentFiles="+more+" (ignore_errors=no)\nLoadState=loaded\n", "capture", "print"),
		"then /etc/default/nametap, "+more+" (no agent answers)", "--uid-owner 996", "-d 10.8.0.0/16")
	v.environment = []string{"KUBERNETES_SERVICE_HOST=10.96.0.1"}
	if r := v.unit("", "capture", "print"); r.code != 0 || strings.Contains(r.stdout, "A NAMETAP_OUTPUT -m owner --uid-owner 994") ||
		!strings.Contains(r.stdout, "of this container") {
		t.Errorf("in a container: %+v", r)
	}
}

// TestCaptureSettingsUnreadable checks what commands say if their user cannot read the settings of the unit.
func TestCaptureSettingsUnreadable(t *testing.T) { // K22
	t.Parallel()
	v := newVM(t, "nft")
	v.start()
	file := v.write("secret", "NAMETAP_CAPTURE_EXCLUDE_UID=991\n")
	if err := os.Chmod(file, 0); err != nil {
		t.Fatal(err)
	}
	bin := v.dir + "/tools"
	if err := os.Mkdir(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	v.script("tools/systemctl", "#!/bin/sh\necho LoadState=loaded; echo 'EnvironmentFiles="+file+" (ignore_errors=yes)'\n")
	v.environment = append(v.environment, "PATH="+bin+":"+os.Getenv("PATH"))
	if r := v.nametap(v.args("print")...); r.code != 0 || !strings.Contains(r.stdout, "cannot read, so run this as root: open "+file+": permission denied") {
		t.Errorf("print: %+v", r)
	}
	if r := v.nametap(v.args("apply")...); r.code != 1 || !strings.Contains(r.stderr, "the settings of nametap.service cannot be read: run this as root") || v.captured() {
		t.Errorf("apply: %+v", r)
	}
}
