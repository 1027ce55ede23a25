package main

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// program returns an ELF file for 64 bits that needs libraries and, if interpreter is set, that loader.
func program(t *testing.T, interpreter string, libraries ...string) string {
	t.Helper()
	const headers, size = 64, 64 // of the file and of a section, in bytes
	names := "\x00.dynstr\x00.dynamic\x00"
	text := "\x00"
	var dynamic []elf.Dyn64
	for _, library := range libraries {
		dynamic = append(dynamic, elf.Dyn64{Tag: int64(elf.DT_NEEDED), Val: uint64(len(text))})
		text += library + "\x00"
	}
	var data bytes.Buffer
	put := func(value any) (offset, length uint64) {
		offset = headers + 56 + uint64(data.Len())
		if err := binary.Write(&data, binary.LittleEndian, value); err != nil {
			t.Fatal(err)
		}
		return offset, headers + 56 + uint64(data.Len()) - offset
	}
	loader, loaderSize := put([]byte(interpreter + "\x00"))
	strings, stringsSize := put([]byte(text))
	entries, entriesSize := put(append(dynamic, elf.Dyn64{}))
	sections, sectionsSize := put([]byte(names))
	table, _ := put([]elf.Section64{
		{},
		{Name: 1, Type: uint32(elf.SHT_STRTAB), Off: strings, Size: stringsSize},
		{Name: 9, Type: uint32(elf.SHT_DYNAMIC), Off: entries, Size: entriesSize, Link: 1, Entsize: 16},
		{Name: 0, Type: uint32(elf.SHT_STRTAB), Off: sections, Size: sectionsSize},
	})
	header := elf.Header64{
		Type: uint16(elf.ET_DYN), Machine: uint16(elf.EM_X86_64), Version: 1, Phoff: headers, Shoff: table, Ehsize: headers,
		Phentsize: 56, Phnum: 1, Shentsize: size, Shnum: 4, Shstrndx: 3,
	}
	copy(header.Ident[:], elf.ELFMAG+"\x02\x01\x01")
	segment := elf.Prog64{Type: uint32(elf.PT_INTERP), Off: loader, Filesz: loaderSize}
	if interpreter == "" {
		segment.Type = uint32(elf.PT_NULL)
	}
	var file bytes.Buffer
	for _, part := range []any{header, segment, data.Bytes()} {
		if err := binary.Write(&file, binary.LittleEndian, part); err != nil {
			t.Fatal(err)
		}
	}
	return file.String()
}

// makeDeb writes a package to a directory, as two files: what dpkg-deb prints of it. A content that begins with "-> " makes
// a link.
func makeDeb(t *testing.T, dir, control string, contents map[string]string) {
	t.Helper()
	var data bytes.Buffer
	archive := tar.NewWriter(&data)
	for path, content := range contents {
		header := &tar.Header{Typeflag: tar.TypeReg, Name: "./" + path, Mode: 0o755, Size: int64(len(content))}
		if target, isLink := strings.CutPrefix(content, "-> "); isLink {
			header, content = &tar.Header{Typeflag: tar.TypeSymlink, Name: "./" + path, Mode: 0o777, Linkname: target}, ""
		}
		if err := archive.WriteHeader(header); err != nil {
			t.Fatal(err)
		}
		if _, err := archive.Write([]byte(content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := archive.Close(); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, strings.Fields(control)[1]+".deb")
	write(t, name, data.String())
	write(t, name+".control", control+"Maintainer: test <test@example.com>\nDescription: test\n")
}

// write writes a file that can be run, and its directory.
func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
		t.Fatal(err)
	}
}

// fakeDebs makes small packages like Debian's, with links in the places of Debian's: the directories of libraries, the
// loader, and the tools. It also makes a dpkg-deb that prints them: not every machine that can run Go has Debian's.
func fakeDebs(t *testing.T, dir, arch string) {
	t.Helper()
	tools := t.TempDir()
	write(t, filepath.Join(tools, "dpkg-deb"), "#!/bin/sh\ncase $1 in --field) cat \"$2.control\" ;; *) cat \"$2\" ;; esac\n")
	t.Setenv("PATH", tools+":"+os.Getenv("PATH"))
	loader, library := "/lib64/ld-linux-x86-64.so.2", "usr/lib/x86_64-linux-gnu/"
	if arch == "arm64" {
		loader, library = "/lib/ld-linux-aarch64.so.1", "usr/lib/aarch64-linux-gnu/"
	}
	control := func(name, version, source string) string {
		return "Package: " + name + "\nVersion: " + version + "\nArchitecture: " + arch + "\n" + source
	}
	makeDeb(t, dir, control("base-files", "13.8", ""), map[string]string{
		"lib": "-> usr/lib", "lib64": "-> usr/lib64", "bin": "-> usr/bin", "etc/os-release": "-> ../usr/lib/os-release",
		"usr/lib/os-release": "ID=debian\nVERSION_CODENAME=trixie\n", "etc/debian_version": "13.8\n",
		"usr/share/doc/base-files/copyright": "/usr/share/common-licenses/GPL.\n", "usr/share/common-licenses/GPL": "-> GPL-3",
		"usr/share/common-licenses/GPL-2": "two", "usr/share/common-licenses/GPL-3": "three", "usr/share/common-licenses/BSD": "other",
	})
	libc := map[string]string{
		library + "libc.so.6": program(t, loader, filepath.Base(loader)), library + filepath.Base(loader): program(t, ""), library + "libm.so.6": program(t, "", "libc.so.6"),
		"usr/share/doc/libc6/copyright": "`/usr/share/common-licenses/GPL-2'.\n", "usr/bin/ldd": "#!/bin/sh\n",
	}
	libc["usr"+loader] = "-> ../lib/" + filepath.Base(library) + "/" + filepath.Base(loader)
	if arch == "arm64" {
		libc["usr"+loader] = "-> " + filepath.Base(library) + "/" + filepath.Base(loader)
	}
	makeDeb(t, dir, control("libc6", "2.41-12", "Source: glibc\n"), libc)
	makeDeb(t, dir, control("libxtables12", "1.8.11-2", "Source: iptables\n"), map[string]string{
		library + "libxtables.so.12": "-> libxtables.so.12.7.0", library + "libxtables.so.12.7.0": program(t, "", "libc.so.6"),
		"usr/share/doc/libxtables12/copyright": "none\n",
	})
	makeDeb(t, dir, control("libunused1", "1", ""), map[string]string{library + "libunused.so.1": program(t, "", "libc.so.6")})
	iptables := map[string]string{
		"usr/sbin/xtables-nft-multi": program(t, loader, "libxtables.so.12", "libc.so.6"), "usr/sbin/xtables-legacy-multi": program(t, loader, "libc.so.6"),
		library + "xtables/libxt_udp.so": program(t, "", "libxtables.so.12"), "usr/bin/iptables-xml": "-> ../sbin/xtables-legacy-multi",
		"usr/share/doc/iptables/copyright": "none\n", "usr/share/man/man8/iptables.8.gz": "a page",
	}
	for _, tool := range []string{"iptables", "ip6tables"} {
		for _, backend := range []string{"nft", "legacy"} {
			for _, suffix := range []string{"", "-save", "-restore"} {
				iptables["usr/sbin/"+tool+"-"+backend+suffix] = "-> xtables-" + backend + "-multi"
			}
		}
	}
	makeDeb(t, dir, control("iptables", "1.8.11-2", ""), iptables)
}
