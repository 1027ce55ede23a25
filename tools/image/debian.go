package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"maps"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// programs are the two programs that all tools of iptables are links to.
var programs = regexp.MustCompile(`^usr/sbin/xtables-(nft|legacy)-multi$`)

// kept matches files of packages that are in the image although no program is linked with them: the plugins, which the
// programs open by name, the copyright files, and os-release, from which scanners of images read the version of Debian.
var kept = regexp.MustCompile(`^usr/lib/[^/]+/xtables/.*\.so$|^usr/share/doc/[^/]+/copyright$|^(etc|usr/lib)/os-release$`)

// tool matches the links by which the programs are called.
var tool = regexp.MustCompile(`^usr/sbin/ip6?tables(-nft|-legacy)?(-save|-restore)?$`)

// toolsOf returns the tools of iptables from the packages in a directory, and the libraries
// that they need, without anything else of Debian.
func toolsOf(dir string) (files, error) {
	packages, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil {
		return nil, err
	}
	if len(packages) == 0 {
		return nil, fmt.Errorf("no packages in %s: run tools/debian-packages", dir)
	}
	all, of := files{}, map[string]files{}
	for _, name := range packages {
		own := files{}
		if err := own.unpack(name); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		maps.Copy(all, own)
		of[name] = own
	}
	chosen := files{}
	var needed []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if programs.MatchString(name) || kept.MatchString(name) || tool.MatchString(name) {
			chosen[name] = all[name]
			needed = append(needed, name)
		}
	}
	for len(needed) > 0 {
		name := needed[0]
		needed = needed[1:]
		more, err := all.libraries(name)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		for _, library := range more {
			if _, exists := chosen[library]; !exists {
				chosen[library] = all[library]
				needed = append(needed, library)
			}
		}
	}
	return chosen, errors.Join(chosen.addLicenses(all), chosen.addPackages(of), chosen.addDefaults())
}

// commonLicense matches the path of a license to which a copyright file refers.
var commonLicense = regexp.MustCompile(`/(usr/share/common-licenses/[A-Za-z]+(-[0-9]+(\.[0-9]+)*)?)`)

// addLicenses adds the licenses to which the copyright files refer. Debian has them once, in base-files.
func (f files) addLicenses(all files) error {
	for _, name := range slices.Sorted(maps.Keys(f)) {
		if path.Base(name) != "copyright" {
			continue
		}
		for _, match := range commonLicense.FindAllSubmatch(f[name].content, -1) {
			license := string(match[1])
			if target := all[license].link; target != "" { // such as GPL, a link to the newest version
				f[license] = all[license]
				license = path.Join(path.Dir(license), target)
			}
			if _, exists := all[license]; !exists {
				return fmt.Errorf("no package has /%s, to which /%s refers", license, name)
			}
			f[license] = all[license]
		}
	}
	return nil
}

// addPackages adds what scanners of images read to find vulnerable packages: the control file of each package
// that has files in the image. It also adds the list of the source packages of these files.
func (f files) addPackages(packages map[string]files) error {
	var sources []string
	for name, own := range packages {
		used := false
		for path := range own {
			_, chosen := f[path]
			used = used || chosen && !strings.HasSuffix(path, "/copyright")
		}
		if !used {
			continue
		}
		control, err := exec.CommandContext(context.Background(), "dpkg-deb", "--field", name).Output()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		f["var/lib/dpkg/status.d/"+strings.TrimSuffix(filepath.Base(name), ".deb")] = file{content: control, mode: 0o644}
		sources = append(sources, sourceOf(string(control)))
	}
	slices.Sort(sources)
	text := `The programs and libraries of this image, except nametap, are Debian's, unchanged. Their licenses are in
/usr/share/doc/*/copyright and /usr/share/common-licenses. Their sources are these source packages of Debian,
with these versions, which every mirror of Debian or Debian's archive of snapshots has:

` + strings.Join(slices.Compact(sources), "\n") + "\n"
	f["usr/share/doc/nametap-init/sources"] = file{content: []byte(text), mode: 0o644}
	return nil
}

// sourceOf returns the source package of a control file, and its version. Without the field Source,
// they are the package's name and version.
func sourceOf(control string) string {
	fields := map[string]string{}
	for line := range strings.Lines(control) {
		if key, value, found := strings.Cut(line, ": "); found {
			fields[key] = strings.TrimSpace(value)
		}
	}
	name, version, _ := strings.Cut(cmp.Or(fields["Source"], fields["Package"]), " ")
	return name + " " + cmp.Or(strings.Trim(version, "()"), fields["Version"])
}

// addDefaults adds the tools whose names have no backend, such as iptables-save. Debian's package makes these links
// when it is installed.
func (f files) addDefaults() error {
	const program = "xtables-nft-multi"
	if _, exists := f["usr/sbin/"+program]; !exists {
		return errors.New("the packages have no " + program)
	}
	for _, base := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			f["usr/sbin/"+base+suffix] = file{link: program}
		}
	}
	return nil
}

// unpack adds the files of a package.
func (f files) unpack(name string) error {
	cmd := exec.CommandContext(context.Background(), "dpkg-deb", "--fsys-tarfile", name)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	content, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("%v: %w\n%s", cmd, err, &stderr)
	}
	archive := tar.NewReader(bytes.NewReader(content))
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		entry := file{mode: header.Mode, link: header.Linkname}
		switch header.Typeflag {
		case tar.TypeReg:
			if entry.content, err = io.ReadAll(archive); err != nil {
				return err
			}
		case tar.TypeSymlink:
		default:
			continue
		}
		f[strings.TrimPrefix(header.Name, "./")] = entry
	}
}

// libraries returns the files that a file needs: the target of a link, or the libraries and the
// loader of a program.
func (f files) libraries(name string) ([]string, error) {
	entry := f[name]
	if entry.link != "" {
		target := path.Join(path.Dir(name), entry.link)
		if path.IsAbs(entry.link) {
			target = entry.link[1:]
		}
		if f.isDirectory(target) {
			return nil, nil
		}
		if _, exists := f[target]; !exists {
			return nil, fmt.Errorf("no package has %s, to which it links", target)
		}
		return []string{target}, nil
	}
	if !bytes.HasPrefix(entry.content, []byte(elf.ELFMAG)) {
		return nil, nil
	}
	binary, err := elf.NewFile(bytes.NewReader(entry.content))
	if err != nil {
		return nil, err
	}
	wanted, err := binary.ImportedLibraries()
	if err != nil {
		return nil, err
	}
	for _, segment := range binary.Progs {
		if segment.Type == elf.PT_INTERP {
			loader, err := io.ReadAll(segment.Open())
			if err != nil {
				return nil, err
			}
			wanted = append(wanted, strings.Trim(string(loader), "/\x00"))
		}
	}
	var found []string
	for _, library := range wanted {
		// The loader is in /lib or /lib64, which base-files has as links to directories in /usr.
		if top, rest, _ := strings.Cut(library, "/"); rest != "" && f[top].link != "" {
			found = append(found, top)
			library = path.Join(f[top].link, rest)
		}
		i := slices.IndexFunc(slices.Sorted(maps.Keys(f)), func(name string) bool {
			return name == library || !strings.Contains(library, "/") && path.Base(name) == library && strings.HasPrefix(strings.TrimPrefix(name, "usr/"), "lib/")
		})
		if i < 0 {
			return nil, fmt.Errorf("no package has %s, which it needs", library)
		}
		found = append(found, slices.Sorted(maps.Keys(f))[i])
	}
	return found, nil
}

// isDirectory reports whether a package has files below a path.
func (f files) isDirectory(name string) bool {
	for other := range f {
		if strings.HasPrefix(other, name+"/") {
			return true
		}
	}
	return false
}
